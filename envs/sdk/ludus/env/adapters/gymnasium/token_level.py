"""Adapter for Gymnasium's token-level environments: one step takes a complete response.

    Discrete(vocabulary) actions, Sequence(Discrete) observations: one token per Gymnasium step

    {"token_ids": [41, 7, 9, 2]} --one token after another--> rewards [0, 0, 1]; the last token is
                                                              unused, as the episode has ended

The observation contains all tokens until now and a reward for each used token. Tokens are used
until the episode ends, or until the environment adds other tokens, because the later tokens of the
response were then sampled without seeing them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Annotated, Any, ClassVar

import gymnasium
import numpy as np
import orjson
from gymnasium import spaces
from pydantic import Field

from ludus.env.adapters import GYMNASIUM
from ludus.env.adapters.gymnasium.environment import (
    AnyGymnasium,
    GymnasiumEpisodes,
    make_gymnasium,
)
from ludus.env.adapters.gymnasium.spaces import json_safe
from ludus.env.types import Action, JsonObject, Observation, Transition
from ludus.proto.errors import ConfigError, IllegalActionError


class TokenAnswer(Action):
    """A response of a language model."""

    token_ids: Annotated[list[int], Field(min_length=1)]


class TokenObservation(Observation):
    """The tokens of the prompt and of the responses."""

    token_ids: list[int]
    """All tokens of the episode."""
    rewards: list[float]
    """Reward for each used token of the response; empty after a reset."""


class TokenLevelEnvironment(GymnasiumEpisodes[TokenAnswer, TokenObservation]):
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
        idle = _idle_environments[self._key]
        super().__init__(idle.pop() if idle else make_gymnasium(env_id, options))
        self._num_tokens = count_tokens(self.gymnasium)
        self._token_ids: list[int] = []
        self._is_reusable = True

    @property
    def options(self) -> JsonObject:
        """The arguments of the constructor."""
        return dict(self._options)

    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[TokenObservation]:
        """Return the environment's first tokens; `options` are passed to Gymnasium."""
        self._is_reusable = False
        element, info = self.start_episode(seed, options)
        self._is_reusable = True
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
            element, reward, terminated, truncated, info = self.gymnasium.step(token_id)
            rewards.append(float(reward))
            self._token_ids = _to_token_ids(element)
            if terminated or truncated or self._token_ids != expected:
                break
        self._is_reusable = True
        observation = TokenObservation(token_ids=self._token_ids, rewards=rewards)
        return self.make_transition(
            observation, rewards, bool(terminated), bool(truncated), info, {}
        )

    def close(self) -> None:
        """Keep the environment for the next session, as it may have loaded a model."""
        if self._is_reusable:
            _idle_environments[self._key].append(self.gymnasium)
        else:
            self.gymnasium.close()

    def _check(self, token_ids: list[int]) -> None:
        self.require_episode()
        unknown_ids = [token_id for token_id in token_ids if not 0 <= token_id < self._num_tokens]
        if unknown_ids:
            raise IllegalActionError(
                f"tokens must be 0 to {self._num_tokens - 1}, got {unknown_ids[0]}; a model with"
                " more embeddings than its tokenizer has tokens can sample tokens that do not exist"
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


_idle_environments: defaultdict[bytes, list[AnyGymnasium]] = defaultdict(list)
"""Environments whose session is over, by the arguments of their constructor."""


def _register(env_id: str, entry_point: str) -> None:
    """Register the id in this process if it is not registered."""
    spec = gymnasium.registry.get(env_id)
    if spec is None or spec.entry_point != entry_point:
        gymnasium.register(id=env_id, entry_point=entry_point)


def _to_token_ids(element: Any) -> list[int]:
    """Convert a sequence of numbers or arrays, or a tensor, to [T] token ids."""
    token_ids: list[int] = np.asarray(element, dtype=np.int64).reshape(-1).tolist()
    return token_ids
