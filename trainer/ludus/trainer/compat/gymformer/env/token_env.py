"""What Gymformer's language environments share: the state is all tokens, an action is the next one.

    reset   prompt --tokenizer--> state
    step    token --> state + token; the last one is paid for the whole answer

All chance comes from the seed of `reset`. The first episode without one follows from the seed that
the environment was made with.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import gymnasium
from gymnasium import spaces
from transformers import PreTrainedTokenizerBase

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.arguments import check_count, path_in, told_as
from ludus.trainer.models.load import load_tokenizer

Tokens = tuple[int, ...]
"""[T] the prompt's tokens, and those of the answer so far."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What an answer came to."""

    reward: float
    is_over: bool
    """False where a limit cut it off that its reward knows nothing of."""


class TokenEnv(gymnasium.Env[Tokens, Any]):
    """An episode is an answer to a prompt, a token a step.

    Args:
        model_name: Hugging Face id, or folder, of the tokenizer.
        max_generation: tokens of an answer.
        seed: of the first episode, where `reset` has none.

    Raises:
        ConfigError: the tokenizer has no end token, or the limit is below 1.
    """

    _model_argument = "model_name"

    def __init__(self, model_name: str, max_generation: int, seed: int) -> None:
        check_count("max_generation", max_generation)
        check_count("seed", seed, least=0)
        self.model_name = path_in(self._model_argument, model_name)
        self.max_generation = int(max_generation)
        with told_as({"model.path": self._model_argument}):
            self.tokenizer = _tokenizer(self.model_name)
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model '{model_name}' expected an end token, with which an answer ends, got none; "
                "take another one, or set eos_token of its tokenizer"
            )
        self._num_tokens = num_tokens = len(self.tokenizer)
        self.action_space = spaces.Discrete(num_tokens)
        self.observation_space = spaces.Sequence(spaces.Discrete(num_tokens))
        self._first_seed: int | None = int(seed)
        self._state: list[int] = []
        self._num_prompt = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tokens, dict[str, Any]]:
        """The tokens of a prompt."""
        seed, self._first_seed = self._first_seed if seed is None else seed, None
        super().reset(seed=seed)
        if not isinstance(options or {}, dict):
            raise ConfigError(f"options expected a dictionary or None, got {options!r:.80}")
        prompt, info = self._begin(seed, options or {})
        self._state = self._encoded(prompt)
        self._num_prompt = len(self._state)
        return tuple(self._state), {"prompt": prompt, **info}

    def step(self, action: int) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """The state with the token; the reward of the answer stands on its last one."""
        token_id = self._token_in(action)
        self._state.append(token_id)
        ended = token_id == self.tokenizer.eos_token_id
        is_full = len(self._state) - self._num_prompt >= self.max_generation
        if not ended and not is_full:
            return tuple(self._state), 0.0, False, False, {}
        answer = self.answer
        ending = self._end(answer, ended=ended)
        info = {"answer": answer, "is_cut_off": not ended, **self._info()}
        return tuple(self._state), ending.reward, ending.is_over, not ending.is_over, info

    def _token_in(self, action: Any) -> int:
        """The token that an action is, which may be a number of numpy's or of torch's."""
        try:
            token_id = int(action)
        except (TypeError, ValueError):
            token_id = -1
        if not 0 <= token_id < self._num_tokens:
            raise ConfigError(
                f"action expected a token from 0 to {self._num_tokens - 1}, got {action!r:.80}"
            )
        return token_id

    @property
    def answer(self) -> str:
        """What was said so far, without special tokens."""
        said = self._state[self._num_prompt :]
        return str(self.tokenizer.decode(said, skip_special_tokens=True))

    @abstractmethod
    def _begin(self, seed: int | None, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The prompt of a new episode, and what is known of it."""

    @abstractmethod
    def _end(self, answer: str, *, ended: bool) -> Ending:
        """What the answer came to; `ended` is False where it was cut off."""

    def _info(self) -> dict[str, Any]:
        """What the last step tells beside the answer."""
        return {}

    def _encoded(self, prompt: str) -> list[int]:
        """The prompt's tokens: as a user's message, where the model knows such."""
        if self.tokenizer.chat_template is None:
            token_ids: list[int] = self.tokenizer.encode(prompt)
            return token_ids
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        token_ids = self.tokenizer.encode(str(text), add_special_tokens=False)
        return token_ids


@lru_cache(maxsize=8)
def _tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model: one for all environments of this process."""
    return load_tokenizer(model_name)
