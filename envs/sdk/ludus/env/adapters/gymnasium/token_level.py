"""Adapter for Gymnasium's token-level environments: one step takes a whole completion.

    Discrete(vocabulary) actions, Sequence(Discrete) observations: one token per Gymnasium step

    {"token_ids": [41, 7, 9, 2]} --one token after another--> rewards [0, 0, 1]; the last token is
                                                              unused: the episode has ended

The observation contains all tokens of the episode so far, and a reward for each used token. Tokens
are used until the episode ends or the environment adds other tokens. The later tokens of the
completion were sampled without these other tokens, so they are not used.
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
    AnyGymnasiumEnv,
    EpisodicGymnasiumEnvironment,
    make_gymnasium,
)
from ludus.env.adapters.gymnasium.spaces import to_plain_json
from ludus.env.types import Action, JsonObject, Observation, Transition
from ludus.proto.errors import ConfigError, IllegalActionError


class TokenAction(Action):
    """A completion of a language model."""

    token_ids: Annotated[list[int], Field(min_length=1)]


class TokenObservation(Observation):
    """The tokens of the prompt and of the completions."""

    token_ids: list[int]
    """All tokens of the episode."""
    rewards: list[float]
    """Reward for each used token of the completion; empty after a reset."""


class TokenLevelEnvironment(EpisodicGymnasiumEnvironment[TokenAction, TokenObservation]):
    """A Gymnasium environment whose actions are tokens, with one step per completion.

    Args:
        env_id: id for `gymnasium.make`, or `module:id`.
        entry_point: "module:Class" for an id that this process may not have registered.
        import_from: folder that contains the module.
        options: keyword arguments of `gymnasium.make`.

    Raises:
        ConfigError: the environment cannot be created, or its spaces do not contain tokens.
    """

    action_type = TokenAction
    observation_type = TokenObservation
    name: ClassVar[str] = f"{GYMNASIUM}-tokens"
    description: ClassVar[str] = "A token-level Gymnasium environment, one completion per step"

    def __init__(
        self,
        env_id: str,
        *,
        entry_point: str | None = None,
        import_from: str | None = None,
        **options: Any,
    ) -> None:
        arguments = {"env_id": env_id, "entry_point": entry_point, "import_from": import_from}
        self._options = {key: argument for key, argument in arguments.items() if argument} | options
        if import_from is not None and import_from not in sys.path:
            sys.path.append(import_from)
        if entry_point is not None:
            spec = gymnasium.registry.get(env_id)
            if spec is None or spec.entry_point != entry_point:
                gymnasium.register(id=env_id, entry_point=entry_point)
        self._options_json = orjson.dumps(self._options, option=orjson.OPT_SORT_KEYS)
        pool = _idle_environments[self._options_json]
        super().__init__(pool.pop() if pool else make_gymnasium(env_id, options))
        self._vocabulary_size = read_vocabulary_size(self.gym_env)
        self._token_ids: list[int] = []
        self._is_reusable = True

    @property
    def options(self) -> JsonObject:
        """The arguments of the constructor."""
        return dict(self._options)

    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[TokenObservation]:
        """Return the environment's first tokens; `options` are passed to Gymnasium."""
        self._is_reusable = False
        gym_observation, info = self.start_episode(seed, options)
        self._is_reusable = True
        self._token_ids = _to_token_ids(gym_observation)
        observation = TokenObservation(token_ids=self._token_ids, rewards=[])
        return Transition(observation, info=to_plain_json(info))

    def step(self, action: TokenAction) -> Transition[TokenObservation]:
        """Take a completion, and return the result with the sum of its rewards.

        Raises:
            IllegalActionError: a token is not in the vocabulary.
        """
        self._require_legal(action.token_ids)
        rewards: list[float] = []
        is_terminated = is_truncated = False
        info: JsonObject = {}
        self._is_reusable = False
        for token_id in action.token_ids:
            appended_token_ids = [*self._token_ids, token_id]
            gym_observation, reward, is_terminated, is_truncated, info = self.gym_env.step(token_id)
            rewards.append(float(reward))
            self._token_ids = _to_token_ids(gym_observation)
            if is_terminated or is_truncated or self._token_ids != appended_token_ids:
                break
        self._is_reusable = True
        observation = TokenObservation(token_ids=self._token_ids, rewards=rewards)
        return self.make_transition(observation, rewards, is_terminated, is_truncated, info, {})

    def close(self) -> None:
        """Keep the environment for the next session, because it may have loaded a model."""
        if self._is_reusable:
            _idle_environments[self._options_json].append(self.gym_env)
        else:
            self.gym_env.close()

    def _require_legal(self, token_ids: list[int]) -> None:
        self.require_episode()
        bad_ids = [token_id for token_id in token_ids if not 0 <= token_id < self._vocabulary_size]
        if bad_ids:
            raise IllegalActionError(
                f"tokens must be 0 to {self._vocabulary_size - 1}, got {bad_ids[0]}; a"
                " model with more embeddings than its tokenizer has tokens can sample unknown ids"
            )


def read_vocabulary_size(environment: AnyGymnasiumEnv) -> int:
    """Return the vocabulary size of an environment whose actions are tokens.

    Raises:
        ConfigError: its actions are not tokens, or its observations are not sequences of tokens.
    """
    action_space, observation_space = environment.action_space, environment.observation_space
    is_sequence = isinstance(observation_space, spaces.Sequence) and isinstance(
        observation_space.feature_space, spaces.Discrete
    )
    if not isinstance(action_space, spaces.Discrete) or action_space.start != 0 or not is_sequence:
        raise ConfigError(
            "expected a token-level environment, with action_space = Discrete(len(tokenizer)) and "
            "observation_space = Sequence(Discrete(len(tokenizer))), got"
            f" {action_space} and {observation_space}"
        )
    return int(action_space.n)


_idle_environments: defaultdict[bytes, list[AnyGymnasiumEnv]] = defaultdict(list)
"""Environments without a session, by the JSON of their constructor arguments."""


def _to_token_ids(gym_observation: Any) -> list[int]:
    """Convert a sequence of numbers or arrays, or a tensor, to [T] token ids."""
    token_ids: list[int] = np.asarray(gym_observation, dtype=np.int64).reshape(-1).tolist()
    return token_ids
