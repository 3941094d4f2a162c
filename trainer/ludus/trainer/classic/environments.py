"""Vector environments: parallel environments behind one interface, in process or on a server.

Environments never reset automatically. After an episode, its last observation stays available until
the player starts the next episode with a seed. So no observation is lost, and an episode is the
same in process and on a server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ludus.env.adapters.gymnasium.interface_check import InterfaceCheck
from ludus.env.adapters.gymnasium.success import find_success, is_game
from ludus.env.client import EnvClient, Session
from ludus.env.transports.address import parse_address
from ludus.env.types import JsonObject, StepResult
from ludus.proto.config import NetworkEnvironmentConfig, RemoteNetworkEnvironment
from ludus.proto.config.network import GYMNASIUM_PREFIX
from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    NotFoundError,
    UnavailableError,
    did_you_mean,
)
from ludus.trainer.setup.environments import make_connect_options

AnySpace = spaces.Space[Any]

_LINGER_S = 30.0
"""Time in seconds that sessions on a server outlive a broken connection."""
_PREFERRED_FIELDS = ("action", "observation", "info_state")
"""Fields that are used if several fields of a server's schema contain numbers."""
_IGNORED_FIELDS = ("metadata", "legal_actions", "num_legal_actions", "reward", "done")


@dataclass(frozen=True, slots=True)
class VectorStep:
    """Results of one step of N environments."""

    observations: np.ndarray
    """[N, ...]; the last observation of finished episodes."""
    rewards: np.ndarray
    """[N] float64."""
    terminated: np.ndarray
    """[N] bool."""
    truncated: np.ndarray
    """[N] bool."""


class GymnasiumEnvironments:
    """Gymnasium environments in this process, without autoreset."""

    def __init__(self, env_id: str, num_environments: int, options: JsonObject) -> None:
        """Raises: NotFoundError: no such id. ConfigError: the environment cannot be made."""
        self.num_environments = num_environments
        self.options = dict(options)
        self._vector_env = _make_vector_env(env_id, num_environments, options)
        self.observation_space = self._vector_env.single_observation_space
        self.action_space = self._vector_env.single_action_space
        self.is_game = is_game(self._vector_env.envs[0])
        self._rewards = np.zeros(num_environments)
        self._terminated = np.zeros(num_environments, dtype=bool)
        self._infos: dict[str, Any] = {}

    def reset(self, seeds: Mapping[int, int]) -> np.ndarray:
        """Start an episode in each environment of `seeds`; return all observations [N, ...]."""
        reset_mask = np.zeros(self.num_environments, dtype=np.bool_)
        reset_mask[list(seeds)] = True
        all_seeds = [seeds.get(index) for index in range(self.num_environments)]
        observations, _ = self._vector_env.reset(seed=all_seeds, options={"reset_mask": reset_mask})
        return np.asarray(observations)

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step all environments with the actions [N, ...]."""
        observations, rewards, terminated, truncated, self._infos = self._vector_env.step(actions)
        self._rewards, self._terminated = rewards, terminated
        return VectorStep(np.asarray(observations), rewards, terminated, truncated)

    def report_success(self, index: int, episode_return: float) -> bool | None:
        """Return whether the episode that just ended was successful; None if unknown."""
        info = {}
        if "is_success" in self._infos and self._infos["_is_success"][index]:
            info = {"is_success": self._infos["is_success"][index]}
        environment = self._vector_env.envs[index]
        terminated, reward = bool(self._terminated[index]), float(self._rewards[index])
        return find_success(environment, terminated, reward, episode_return, info)

    def close(self) -> None:
        """Close the environments."""
        self._vector_env.close()


class RemoteEnvironments:
    """Sessions on an environment server."""

    def __init__(self, config: RemoteNetworkEnvironment, num_environments: int) -> None:
        """Raises: ConfigError: the server is unreachable, or its observations are not numeric."""
        self.num_environments = num_environments
        self._address = parse_address(config.address)
        self._client = _connect(config)
        try:
            description = self._client.describe()
            self.options, self.is_game = description.options, description.is_game
            self._sessions, results = self._open_sessions()
            self._action_field, self.action_space = _find_field(
                description.name, "actions", description.action_schema, {}
            )
            self._observation_field, self.observation_space = _find_field(
                description.name,
                "observations",
                description.observation_schema,
                results[0].observation,
            )
        except BaseException:
            self._client.close()
            raise
        self._results: list[StepResult] = results
        is_discrete = isinstance(self.observation_space, spaces.Discrete | spaces.MultiDiscrete)
        self._dtype = np.int64 if is_discrete else np.float32

    def reset(self, seeds: Mapping[int, int]) -> np.ndarray:
        """Start an episode in each environment of `seeds`; return all observations [N, ...]."""

        async def reset_sessions() -> list[StepResult]:
            sessions = {index: self._sessions[index].async_counterpart for index in seeds}
            return await asyncio.gather(
                *(session.reset(seed=seeds[index]) for index, session in sessions.items())
            )

        results = self._client.loop_thread.run(reset_sessions())
        for index, result in zip(seeds, results, strict=True):
            self._results[index] = result
        return self._read_observations()

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step all environments with the actions [N, ...]."""

        async def step_sessions() -> list[StepResult]:
            return await asyncio.gather(
                *(
                    session.async_counterpart.step({self._action_field: action})
                    for session, action in zip(self._sessions, actions.tolist(), strict=True)
                )
            )

        # Concurrent calls share the messages on the connection.
        self._results = self._client.loop_thread.run(step_sessions())
        return VectorStep(
            self._read_observations(),
            np.array([result.reward or 0.0 for result in self._results]),
            np.array([result.terminated for result in self._results]),
            np.array([result.truncated for result in self._results]),
        )

    def report_success(self, index: int, episode_return: float) -> bool | None:
        """Return whether the episode that just ended was successful; None if unknown."""
        return self._results[index].success

    def close(self) -> None:
        """Close the connection and its sessions."""
        self._client.close()

    def _open_sessions(self) -> tuple[list[Session], list[StepResult]]:
        # Only gRPC sessions can outlive a broken connection.
        linger_s = _LINGER_S if self._address.is_grpc else 0.0
        pairs = [
            self._client.open(seed=0, with_text=False, linger_s=linger_s)
            for _ in range(self.num_environments)
        ]
        return [session for session, _ in pairs], [result for _, result in pairs]

    def _read_observations(self) -> np.ndarray:
        observations = [result.observation[self._observation_field] for result in self._results]
        return np.array(observations, dtype=self._dtype)


VectorEnvironment = GymnasiumEnvironments | RemoteEnvironments
"""Environments that are stepped together."""


def make_environments(config: NetworkEnvironmentConfig, num_environments: int) -> VectorEnvironment:
    """Return the parallel environments of a run."""
    if isinstance(config, RemoteNetworkEnvironment):
        return RemoteEnvironments(config, num_environments)
    env_id = config.package.removeprefix(GYMNASIUM_PREFIX)
    return GymnasiumEnvironments(env_id, num_environments, config.options)


def _make_vector_env(
    env_id: str, num_environments: int, options: JsonObject
) -> SyncVectorEnv[Any, Any]:
    def make_environment() -> gymnasium.Env[Any, Any]:
        return InterfaceCheck(gymnasium.make(env_id, **{"disable_env_checker": True, **options}))

    target = f"'{GYMNASIUM_PREFIX}{env_id}'"
    try:
        return SyncVectorEnv(
            [make_environment] * num_environments, autoreset_mode=AutoresetMode.DISABLED
        )
    except gymnasium.error.UnregisteredEnv as error:
        name = env_id.rpartition(":")[2]
        hint = did_you_mean(name, gymnasium.registry) or "see gymnasium.pprint_registry()"
        raise NotFoundError(f"Gymnasium has no environment '{env_id}'; {hint} ({error})") from None
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"{target} cannot be made: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{target} cannot be made with options {options}: {error}") from error


def _connect(config: RemoteNetworkEnvironment) -> EnvClient:
    try:
        return EnvClient.connect(config.address, make_connect_options(config))
    except (UnavailableError, AuthenticationError) as error:
        raise ConfigError(f"environment.address = '{config.address}': {error}") from error


def _find_field(
    environment: str, purpose: str, schema: JsonObject, example: JsonObject
) -> tuple[str, AnySpace]:
    """Return the field of actions or observations that contains numbers, and its space."""
    fields = schema.get("properties", {})
    field_spaces = {
        name: space
        for name, field in fields.items()
        if name not in _IGNORED_FIELDS
        and (space := _make_space(field, example.get(name))) is not None
    }
    for name in _PREFERRED_FIELDS:
        if name in field_spaces:
            return name, field_spaces[name]
    if len(field_spaces) != 1:
        raise ConfigError(
            f"{purpose} of '{environment}' must have one field of numbers, and integers must have "
            f"bounds, got {fields}"
        )
    return next(iter(field_spaces.items()))


def _make_space(schema: JsonObject, example: Any) -> AnySpace | None:
    """Return the space of the values of a JSON schema; None if they are not bounded numbers.

    integer within bounds                Discrete
    list of integers within bounds       MultiDiscrete
    list (of lists) of numbers           Box

    The length of a list comes from the schema, or from an example if the schema leaves it open.
    """
    flat_schema = _flatten_schema(schema, example)
    if flat_schema is None:
        return None
    shape, numbers = flat_schema
    low = np.array([number.get("minimum", -math.inf) for number in numbers])
    high = np.array([number.get("maximum", math.inf) for number in numbers])
    if all(number.get("type") == "number" for number in numbers):
        box_low, box_high = low.astype(np.float32), high.astype(np.float32)
        return spaces.Box(box_low.reshape(shape), box_high.reshape(shape), dtype=np.float32)
    if not np.isfinite([low, high]).all():
        return None
    start, counts = low.astype(np.int64), (high - low + 1).astype(np.int64)
    if shape == ():
        return spaces.Discrete(int(counts[0]), start=int(start[0]))
    return spaces.MultiDiscrete(counts.reshape(shape), start=start.reshape(shape))


def _flatten_schema(
    schema: JsonObject, example: Any
) -> tuple[tuple[int, ...], list[JsonObject]] | None:
    """Return the shape of a value, and the schemas of its numbers in row-major order."""
    json_type = schema.get("type")
    if json_type in ("integer", "number"):
        return (), [schema]
    if json_type != "array":
        return None
    items = schema.get("prefixItems") or _repeat_items(schema, example)
    if not items:
        return None
    examples = example if isinstance(example, list) else [None] * len(items)
    flat_schemas = [_flatten_schema(*pair) for pair in zip(items, examples, strict=False)]
    valid_schemas = [flat_schema for flat_schema in flat_schemas if flat_schema is not None]
    shapes = {shape for shape, _ in valid_schemas}
    if len(valid_schemas) != len(flat_schemas) or len(shapes) != 1:
        return None
    numbers = [number for _, item_numbers in valid_schemas for number in item_numbers]
    return (len(items), *shapes.pop()), numbers


def _repeat_items(schema: JsonObject, example: Any) -> list[JsonObject]:
    """Return the schema of each item of a list whose items share one schema."""
    min_items, max_items = schema.get("minItems"), schema.get("maxItems")
    if min_items is not None and min_items == max_items:
        return [schema.get("items", {})] * int(min_items)
    return [schema.get("items", {})] * len(example) if isinstance(example, list) else []
