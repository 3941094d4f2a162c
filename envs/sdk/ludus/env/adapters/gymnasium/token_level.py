"""Adapter for Gymnasium's token-level environments: one step takes a complete response.

    Discrete(vocabulary) actions, Sequence(Discrete) observations: one token per Gymnasium step

    {"token_ids": [41, 7, 9, 2]} --one token after another--> rewards [0, 0, 1]; the last token is
                                                              unused, as the episode has ended

The observation contains all tokens until now and a reward for each used token. Tokens are used
until the episode ends, or until the environment adds other tokens, because the later tokens of the
response were then sampled without seeing them.
"""

from __future__ import annotations

import secrets
import sys
import threading
from typing import Annotated, Any, ClassVar

import gymnasium
import numpy as np
import orjson
from gymnasium import spaces
from pydantic import Field

from ludus.env.adapters import GYMNASIUM
from ludus.env.adapters.gymnasium.environment import (
    AnyGymnasium,
    GymnasiumState,
    make_gymnasium,
)
from ludus.env.adapters.gymnasium.spaces import json_safe
from ludus.env.adapters.gymnasium.success import FinalStep, find_success
from ludus.env.environment import Environment
from ludus.env.types import Action, JsonObject, Observation, Transition
from ludus.proto.errors import (
    ConfigError,
    EpisodeStateError,
    ErrorCode,
    IllegalActionError,
)

_SEED_BITS = 32


class TokenAnswer(Action):
    """A response of a language model."""

    token_ids: Annotated[list[int], Field(min_length=1)]


class TokenObservation(Observation):
    """The tokens of the prompt and of the responses."""

    token_ids: list[int]
    """All tokens of the episode."""
    rewards: list[float]
    """Reward for each used token of the response; empty after a reset."""


class TokenLevelEnvironment(Environment[TokenAnswer, TokenObservation, GymnasiumState]):
    """A Gymnasium environment whose actions are tokens, with one step per response.

    Args:
        env_id: id for `gymnasium.make`, or `module:id`.
        entry_point: "module:Class" for an id that this process may not have registered.
        import_from: folder that contains the module.
        options: keyword arguments of `gymnasium.make`.

    Raises:
        ConfigError: the environment cannot be created, or its spaces do not contain tokens.
    """

    action_type = TokenAnswer
    observation_type = TokenObservation
    state_type = GymnasiumState
    name: ClassVar[str] = f"{GYMNASIUM}-tokens"
    description: ClassVar[str] = "A token-level Gymnasium environment, an answer at a time"

    def __init__(
        self,
        env_id: str,
        *,
        entry_point: str | None = None,
        import_from: str | None = None,
        **options: Any,
    ) -> None:
        named = {"env_id": env_id, "entry_point": entry_point, "import_from": import_from}
        self._options = {name: value for name, value in named.items() if value} | options
        if import_from is not None and import_from not in sys.path:
            sys.path.append(import_from)
        if entry_point is not None:
            _register(env_id, entry_point)
        self._key = orjson.dumps(self._options, option=orjson.OPT_SORT_KEYS)
        self._gymnasium = _idle.take(self._key) or make_gymnasium(env_id, options)
        self._num_tokens = count_tokens(self._gymnasium)
        self._token_ids: list[int] = []
        self._is_playing = False
        self._is_reusable = True
        self._state = GymnasiumState()

    @property
    def options(self) -> JsonObject:
        """The arguments of the constructor."""
        return dict(self._options)

    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[TokenObservation]:
        """Return the environment's first tokens; `options` are passed to Gymnasium."""
        if seed is None:  # Gymnasium would otherwise continue with the last episode's generator
            seed = secrets.randbits(_SEED_BITS)
        self._is_playing, self._is_reusable = False, False
        element, info = self._gymnasium.reset(seed=seed, options=options or None)
        self._is_playing, self._is_reusable = True, True
        self._state = GymnasiumState()
        self._token_ids = _to_token_ids(element)
        observation = TokenObservation(token_ids=self._token_ids, rewards=[])
        return Transition(observation, info=json_safe(info))

    def step(self, action: TokenAnswer) -> Transition[TokenObservation]:
        """Take a response, and return the result with the sum of its rewards.

        Raises:
            IllegalActionError: a token is not in the vocabulary.
        """
        self._check(action.token_ids)
        rewards: list[float] = []
        terminated = truncated = False
        info: JsonObject = {}
        self._is_reusable = False
        for token_id in action.token_ids:
            expected = [*self._token_ids, token_id]
            element, reward, terminated, truncated, info = self._gymnasium.step(token_id)
            rewards.append(float(reward))
            self._token_ids = _to_token_ids(element)
            if terminated or truncated or self._token_ids != expected:
                break
        self._is_reusable = True
        self._is_playing = not (terminated or truncated)
        self._state.step_count += 1
        self._state.episode_return += sum(rewards)
        success = None
        if not self._is_playing:
            total = self._state.episode_return
            success = find_success(FinalStep(self._gymnasium, terminated, rewards[-1], total, info))
        return Transition(
            TokenObservation(token_ids=self._token_ids, rewards=rewards),
            sum(rewards),
            bool(terminated),
            bool(truncated),
            info=json_safe(info),
            success=success,
        )

    @property
    def state(self) -> GymnasiumState:
        """The number of responses and the return until now."""
        return self._state

    def close(self) -> None:
        """Keep the environment for the next session, as it may have loaded a model."""
        if self._is_reusable:
            _idle.add(self._key, self._gymnasium)
        else:
            self._gymnasium.close()

    def _check(self, token_ids: list[int]) -> None:
        if not self._is_playing:
            raise EpisodeStateError(
                "a step needs a running episode; call reset",
                ErrorCode.EPISODE_OVER,
            )
        unknown_ids = [token_id for token_id in token_ids if not 0 <= token_id < self._num_tokens]
        if unknown_ids:
            raise IllegalActionError(
                f"tokens must be 0 to {self._num_tokens - 1}, got {unknown_ids[0]}; a model with "
                "more"
                " embeddings than its tokenizer has tokens can sample tokens that do not exist"
            )


def count_tokens(environment: AnyGymnasium) -> int:
    """Return the number of tokens in an environment whose actions are tokens.

    Raises:
        ConfigError: its actions are not tokens, or its observations are not sequences of tokens.
    """
    actions, observations = environment.action_space, environment.observation_space
    is_sequence = isinstance(observations, spaces.Sequence) and isinstance(
        observations.feature_space, spaces.Discrete
    )
    if not isinstance(actions, spaces.Discrete) or actions.start != 0 or not is_sequence:
        raise ConfigError(
            "expected a token-level environment, with action_space = Discrete(len(tokenizer)) and "
            "observation_space = Sequence(Discrete(len(tokenizer))), got"
            f" {actions} and {observations}"
        )
    return int(actions.n)


class _IdleEnvironments:
    """Environments whose session is over, by the arguments of their constructor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environments: dict[bytes, list[AnyGymnasium]] = {}

    def take(self, key: bytes) -> AnyGymnasium | None:
        """Remove and return an environment, or return None if there is none."""
        with self._lock:
            environments = self._environments.get(key)
            return environments.pop() if environments else None

    def add(self, key: bytes, environment: AnyGymnasium) -> None:
        """Keep an environment for the next session."""
        with self._lock:
            self._environments.setdefault(key, []).append(environment)


_idle = _IdleEnvironments()


def _register(env_id: str, entry_point: str) -> None:
    """Register the id in this process if it is not registered."""
    spec = gymnasium.registry.get(env_id)
    if spec is None or spec.entry_point != entry_point:
        gymnasium.register(id=env_id, entry_point=entry_point)


def _to_token_ids(element: Any) -> list[int]:
    """Convert a sequence of numbers or arrays, or a tensor, to [T] token ids."""
    token_ids: list[int] = np.asarray(element, dtype=np.int64).reshape(-1).tolist()
    return token_ids
