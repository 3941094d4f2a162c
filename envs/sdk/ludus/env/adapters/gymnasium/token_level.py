"""Gymnasium's token-level environments as ours: a whole answer of a language model is one step.

    Discrete(vocabulary) actions, Sequence(Discrete) observations: a step there is a token

    {"token_ids": [41, 7, 9, 2]} --one token after the other--> rewards [0, 0, 1], the rest unread
                                                                since the episode has ended

The observation holds all tokens so far and a reward for each token that was taken. Tokens are
taken until the episode ends, or until the environment shows anything but the tokens that it was
given: what follows was then chosen without having seen that.
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
from ludus.env.adapters.gymnasium.success import Ending, success_of
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
    """What a language model says."""

    token_ids: Annotated[list[int], Field(min_length=1)]


class TokenObservation(Observation):
    """What a language model has seen and said."""

    token_ids: list[int]
    """All of it, from the first token on."""
    rewards: list[float]
    """One for each token of the answer that was taken; empty after a reset."""


class TokenLevelEnvironment(Environment[TokenAnswer, TokenObservation, GymnasiumState]):
    """A Gymnasium environment whose actions are tokens, an answer at a time.

    Args:
        env_id: that `gymnasium.make` knows, also as `module:id`.
        entry_point: "module:Class" of an id that this process may not know yet.
        import_from: a folder in which its module is found.
        options: keyword arguments of `gymnasium.make`.

    Raises:
        ConfigError: it cannot be made, or its spaces are not those of tokens.
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
        self._num_tokens = num_tokens_of(self._gymnasium)
        self._seen: list[int] = []
        self._is_playing = False
        self._is_sound = True
        self._state = GymnasiumState()

    @property
    def options(self) -> JsonObject:
        """What it was built with."""
        return dict(self._options)

    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[TokenObservation]:
        """The first tokens, which the environment chose; options are Gymnasium's `options`."""
        if seed is None:  # Gymnasium would continue with the last episode's generator
            seed = secrets.randbits(_SEED_BITS)
        self._is_playing, self._is_sound = False, False
        element, info = self._gymnasium.reset(seed=seed, options=options or None)
        self._is_playing, self._is_sound = True, True
        self._state = GymnasiumState()
        self._seen = _listed(element)
        observation = TokenObservation(token_ids=self._seen, rewards=[])
        return Transition(observation, info=json_safe(info))

    def step(self, action: TokenAnswer) -> Transition[TokenObservation]:
        """What the answer led to; its rewards add up.

        Raises:
            IllegalActionError: a token is none of the vocabulary.
        """
        self._check(action.token_ids)
        rewards: list[float] = []
        terminated = truncated = False
        info: JsonObject = {}
        self._is_sound = False
        for token_id in action.token_ids:
            expected = [*self._seen, token_id]
            element, reward, terminated, truncated, info = self._gymnasium.step(token_id)
            rewards.append(float(reward))
            self._seen = _listed(element)
            if terminated or truncated or self._seen != expected:
                break
        self._is_sound = True
        self._is_playing = not (terminated or truncated)
        self._state.step_count += 1
        self._state.episode_return += sum(rewards)
        success = None
        if not self._is_playing:
            total = self._state.episode_return
            success = success_of(Ending(self._gymnasium, terminated, rewards[-1], total, info))
        return Transition(
            TokenObservation(token_ids=self._seen, rewards=rewards),
            sum(rewards),
            bool(terminated),
            bool(truncated),
            info=json_safe(info),
            success=success,
        )

    @property
    def state(self) -> GymnasiumState:
        """Answers and return so far."""
        return self._state

    def close(self) -> None:
        """Leave the environment to the next session: it may have loaded a tokenizer or a model."""
        if self._is_sound:
            _idle.give(self._key, self._gymnasium)
        else:
            self._gymnasium.close()

    def _check(self, token_ids: list[int]) -> None:
        if not self._is_playing:
            raise EpisodeStateError(
                "expected a running episode, got a step before or after one; call reset",
                ErrorCode.EPISODE_OVER,
            )
        unknown = [token_id for token_id in token_ids if not 0 <= token_id < self._num_tokens]
        if unknown:
            raise IllegalActionError(
                f"expected tokens from 0 to {self._num_tokens - 1}, got {unknown[0]}; a model with "
                "more embeddings than its tokenizer has tokens may say some that do not exist"
            )


def num_tokens_of(environment: AnyGymnasium) -> int:
    """How many tokens there are, in an environment whose actions are tokens.

    Raises:
        ConfigError: its actions are none, or it does not show them as a sequence.
    """
    actions, shown = environment.action_space, environment.observation_space
    is_sequence = isinstance(shown, spaces.Sequence) and isinstance(
        shown.feature_space, spaces.Discrete
    )
    if not isinstance(actions, spaces.Discrete) or actions.start != 0 or not is_sequence:
        raise ConfigError(
            "expected a token-level environment, with action_space = Discrete(len(tokenizer)) and "
            f"observation_space = Sequence(Discrete(len(tokenizer))), got {actions} and {shown}"
        )
    return int(actions.n)


class _Idle:
    """Environments whose session is over, by what they were made with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[AnyGymnasium]] = {}

    def take(self, key: bytes) -> AnyGymnasium | None:
        """One that nobody else has; None where there is none."""
        with self._lock:
            waiting = self._waiting.get(key)
            return waiting.pop() if waiting else None

    def give(self, key: bytes, environment: AnyGymnasium) -> None:
        """Keep it for the next session."""
        with self._lock:
            self._waiting.setdefault(key, []).append(environment)


_idle = _Idle()


def _register(env_id: str, entry_point: str) -> None:
    """Make the id known to this process, unless it is."""
    known = gymnasium.registry.get(env_id)
    if known is None or known.entry_point != entry_point:
        gymnasium.register(id=env_id, entry_point=entry_point)


def _listed(element: Any) -> list[int]:
    """[T] token ids, whatever the sequence is made of: numbers, arrays, or a tensor."""
    listed: list[int] = np.asarray(element, dtype=np.int64).reshape(-1).tolist()
    return listed
