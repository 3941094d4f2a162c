"""Environments side by side, behind one interface: Gymnasium's here, or a server's by `step_many`.

Nothing begins by itself. An episode that has ended keeps its last observation until whoever plays
begins the next one, from a seed of its own: so no observation is lost over an end, no step is
invented, and an episode is the same wherever it is played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ludus.env.adapters.gymnasium.success import Ending, success_of
from ludus.env.client import EnvClient, Reset, Session
from ludus.env.transports.address import parse_address
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.config import NetworkEnvironmentConfig, RemoteNetworkEnvironment
from ludus.proto.config.network import GYMNASIUM_PREFIX
from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    EnvError,
    NotFoundError,
    UnavailableError,
    did_you_mean,
)
from ludus.trainer.classic.schemas import field_and_space
from ludus.trainer.setup.environments import make_connect_options

AnySpace = spaces.Space[Any]
_LINGER_S = 30.0
"""How long sessions on a server outlive a connection that breaks."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one step of all environments led to; of N environments."""

    observations: np.ndarray
    """[N, ...]; where an episode has ended, its last one."""
    rewards: np.ndarray
    """[N] float64."""
    terminated: np.ndarray
    """[N] bool."""
    truncated: np.ndarray
    """[N] bool."""


class VectorEnvironment(Protocol):
    """N environments that are stepped together."""

    num: int
    observation_space: AnySpace
    """Of one of them."""
    action_space: AnySpace
    options: JsonObject
    """What they were built with."""

    def reset(self, seeds: Mapping[int, int]) -> np.ndarray:
        """All observations [N, ...], once those of `seeds` have begun an episode."""

    def step(self, actions: np.ndarray) -> Stepped:
        """What the actions [N, ...] led to."""

    def success(self, index: int, episode_return: float) -> bool | None:
        """Whether the episode that has just ended succeeded; None where nothing says so."""

    def close(self) -> None:
        """Free what they hold."""


class GymnasiumEnvironments:
    """Environments of this process, by Gymnasium's vector API with autoreset turned off."""

    def __init__(self, env_id: str, num: int, options: JsonObject) -> None:
        """Raises: NotFoundError: no such id. ConfigError: it cannot be made."""
        self.num = num
        self.options = dict(options)
        self._vector = _make(env_id, num, options)
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space
        self._rewards = np.zeros(num)
        self._terminated = np.zeros(num, dtype=bool)
        self._infos: dict[str, Any] = {}

    def reset(self, seeds: Mapping[int, int]) -> np.ndarray:
        """All observations [N, ...], once those of `seeds` have begun an episode."""
        begins = np.zeros(self.num, dtype=np.bool_)
        begins[list(seeds)] = True
        of_all = [seeds.get(index) for index in range(self.num)]
        observations, _ = self._vector.reset(seed=of_all, options={"reset_mask": begins})
        return np.asarray(observations)

    def step(self, actions: np.ndarray) -> Stepped:
        """What the actions [N, ...] led to."""
        observations, rewards, terminated, truncated, self._infos = self._vector.step(actions)
        self._rewards, self._terminated = rewards, terminated
        return Stepped(np.asarray(observations), rewards, terminated, truncated)

    def success(self, index: int, episode_return: float) -> bool | None:
        """Whether the episode that has just ended succeeded; None where nothing says so."""
        said = {}
        if "is_success" in self._infos and self._infos["_is_success"][index]:
            said = {"is_success": self._infos["is_success"][index]}
        environment = self._vector.envs[index]
        terminated, reward = bool(self._terminated[index]), float(self._rewards[index])
        return success_of(Ending(environment, terminated, reward, episode_return, said))

    def close(self) -> None:
        """Close the environments."""
        self._vector.close()


class RemoteEnvironments:
    """Sessions on an environment server, all stepped in one call."""

    def __init__(self, config: RemoteNetworkEnvironment, num: int) -> None:
        """Raises: ConfigError: the server is not there, or its observations are no numbers."""
        self.num = num
        self._address = parse_address(config.address)
        self._client = _connect(config)
        try:
            described = self._client.describe()
            self.options = described.options
            self._sessions, first = self._open(num)
            self._action_field, self.action_space = _action_of(described)
            self._field, self.observation_space = _observation_of(described, first)
        except BaseException:
            self._client.close()
            raise
        self._results: list[StepResult] = first
        self._kind = np.int64 if _is_whole(self.observation_space) else np.float32

    def reset(self, seeds: Mapping[int, int]) -> np.ndarray:
        """All observations [N, ...], once those of `seeds` have begun an episode."""
        calls = [(self._sessions[index], Reset(seed=seed)) for index, seed in seeds.items()]
        for index, result in zip(seeds, self._client.step_many(calls), strict=True):
            self._results[index] = _result(result)
        return self._observations()

    def step(self, actions: np.ndarray) -> Stepped:
        """What the actions [N, ...] led to."""
        calls = [
            (session, {self._action_field: action})
            for session, action in zip(self._sessions, actions.tolist(), strict=True)
        ]
        self._results = [_result(result) for result in self._client.step_many(calls)]
        return Stepped(
            self._observations(),
            np.array([result.reward or 0.0 for result in self._results]),
            np.array([result.terminated for result in self._results]),
            np.array([result.truncated for result in self._results]),
        )

    def success(self, index: int, episode_return: float) -> bool | None:
        """Whether the episode that has just ended succeeded; None where nothing says so."""
        return self._results[index].success

    def close(self) -> None:
        """End the connection, and the sessions with it."""
        self._client.close()

    def _open(self, num: int) -> tuple[list[Session], list[StepResult]]:
        # Where a broken connection ends them, a linger would be refused.
        linger_s = _LINGER_S if self._address.is_grpc else 0.0
        opened = [self._client.open(seed=0, with_text=False, linger_s=linger_s) for _ in range(num)]
        return [session for session, _ in opened], [first for _, first in opened]

    def _observations(self) -> np.ndarray:
        seen = [result.observation[self._field] for result in self._results]
        return np.array(seen, dtype=self._kind)


def make_environments(config: NetworkEnvironmentConfig, num: int) -> VectorEnvironment:
    """So many environments as a run's section says.

    Raises:
        UserError: they cannot be had as configured.
    """
    if isinstance(config, RemoteNetworkEnvironment):
        return RemoteEnvironments(config, num)
    env_id = config.package.removeprefix(GYMNASIUM_PREFIX)
    return GymnasiumEnvironments(env_id, num, config.options)


def _make(env_id: str, num: int, options: JsonObject) -> SyncVectorEnv[Any, Any]:
    def make_one() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(env_id, **{"disable_env_checker": True, **options})

    try:
        return SyncVectorEnv([make_one] * num, copy=True, autoreset_mode=AutoresetMode.DISABLED)
    except gymnasium.error.UnregisteredEnv as error:
        name = env_id.rpartition(":")[2]
        hint = did_you_mean(name, gymnasium.registry) or "see gymnasium.pprint_registry()"
        raise NotFoundError(f"Gymnasium has no environment '{env_id}'; {hint} ({error})") from None
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"'{GYMNASIUM_PREFIX}{env_id}' cannot be made: {error}") from error
    except TypeError as error:
        raise ConfigError(
            f"'{GYMNASIUM_PREFIX}{env_id}' cannot be made with options {options}: {error}"
        ) from error


def _connect(config: RemoteNetworkEnvironment) -> EnvClient:
    try:
        return EnvClient.connect(config.address, make_connect_options(config))
    except (UnavailableError, AuthenticationError) as error:
        raise ConfigError(f"environment.address = '{config.address}': {error}") from error


def _result(outcome: StepResult | EnvError) -> StepResult:
    """The result; a session that is lost ends the run, which continues from its checkpoint."""
    if isinstance(outcome, EnvError):
        raise outcome
    return outcome


def _action_of(described: EnvironmentDescription) -> tuple[str, AnySpace]:
    found = field_and_space(described.action_schema, {})
    if found is None:
        raise ConfigError(
            f"expected actions of '{described.name}' that are one number within bounds, or several,"
            f" got {described.action_schema.get('properties')}"
        )
    return found


def _observation_of(
    described: EnvironmentDescription, first: Sequence[StepResult]
) -> tuple[str, AnySpace]:
    found = field_and_space(described.observation_schema, first[0].observation)
    if found is None:
        raise ConfigError(
            f"expected observations of '{described.name}' with one field of numbers, got "
            f"{described.observation_schema.get('properties')}"
        )
    return found


def _is_whole(space: AnySpace) -> bool:
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
