"""Base class of Gymformer's language environments: a state is all tokens, an action is one token.

    reset   prompt --tokenizer--> state
    step    token --> state + token; the last token gets the reward of the whole completion

All randomness comes from the seed of `reset`. If the first `reset` gets no seed, the seed of the
constructor is used.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import Any

import gymnasium
from gymnasium import spaces

from ludus.proto.config.section import NonNegativeInt, PositiveInt
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.checks import PathText, check_value, rename_in_errors
from ludus.trainer.models.load import load_tokenizer

Tokens = tuple[int, ...]
"""Token ids [T] of the prompt and of the completion so far."""
_load_cached_tokenizer = lru_cache(maxsize=8)(load_tokenizer)
"""Function that loads a tokenizer, which all environments of this process share."""


class TokenEnv(gymnasium.Env[Tokens, Any]):
    """An environment whose episodes are completions of a prompt; each step takes one token.

    Args:
        model_name: Hugging Face id or folder of the tokenizer.
        max_generation: maximum number of tokens per completion.
        seed: seed of the first episode if `reset` gets no seed.

    Raises:
        ConfigError: the tokenizer has no EOS token, or the limit is below 1.
    """

    model_argument = "model_name"
    """Name of the constructor's argument for the model."""
    is_truncated_at_limit = False
    """True if the token limit truncates the episode. Otherwise it acts like an EOS token."""

    def __init__(self, model_name: str, max_generation: int, seed: int) -> None:
        self.max_generation: int = check_value("max_generation", PositiveInt, max_generation)
        self._first_seed: int | None = check_value("seed", NonNegativeInt, seed)
        self.model_name: str = check_value(self.model_argument, PathText, model_name)
        with rename_in_errors({"model.path": self.model_argument}):
            self.tokenizer = _load_cached_tokenizer(self.model_name)
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model '{model_name}' has no EOS token to end a completion; use another model, "
                "or set eos_token of its tokenizer"
            )
        self._num_tokens = num_tokens = len(self.tokenizer)
        self.action_space = spaces.Discrete(num_tokens)
        self.observation_space = spaces.Sequence(spaces.Discrete(num_tokens))
        self._state: list[int] = []
        self._num_prompt_tokens = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tokens, dict[str, Any]]:
        """Start an episode and return the tokens of its prompt."""
        seed, self._first_seed = self._first_seed if seed is None else seed, None
        super().reset(seed=seed)
        if not isinstance(options or {}, dict):
            raise ConfigError(f"options must be a dictionary or None, got {options!r:.80}")
        prompt, info = self._start_episode(options or {})
        self._state = self._encode_prompt(prompt)
        self._num_prompt_tokens = len(self._state)
        return tuple(self._state), {"prompt": prompt, **info}

    def step(self, action: int) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """Append a token and return the new state; the last token gets the completion's reward."""
        token_id = self._check_token(action)
        self._state.append(token_id)
        has_ended = token_id == self.tokenizer.eos_token_id
        is_full = len(self._state) - self._num_prompt_tokens >= self.max_generation
        if not has_ended and not is_full:
            return tuple(self._state), 0.0, False, False, {}
        answer = self.answer
        is_truncated = self.is_truncated_at_limit and not has_ended
        reward = 0.0 if is_truncated else self._score(answer)
        info = {"answer": answer, "is_cut_off": not has_ended, **self._make_final_info()}
        return tuple(self._state), reward, not is_truncated, is_truncated, info

    def _check_token(self, action: Any) -> int:
        """Return an action as a token id; NumPy and torch numbers are accepted."""
        try:
            token_id = int(action)
        except (TypeError, ValueError):
            token_id = -1
        if not 0 <= token_id < self._num_tokens:
            raise ConfigError(
                f"action must be a token id from 0 to {self._num_tokens - 1}, got {action!r:.80}"
            )
        return token_id

    @property
    def answer(self) -> str:
        """Text of the completion so far, without end tokens and padding."""
        hidden_ids = (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        completion_ids = self._state[self._num_prompt_tokens :]
        shown_ids = [token_id for token_id in completion_ids if token_id not in hidden_ids]
        return str(self.tokenizer.decode(shown_ids, skip_special_tokens=False))

    @abstractmethod
    def _start_episode(self, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the prompt of a new episode and its info."""

    @abstractmethod
    def _score(self, answer: str) -> float:
        """Return the reward of a completion."""

    def _make_final_info(self) -> dict[str, Any]:
        """Return additional info for the last step."""
        return {}

    def _encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, as a user message if the model has a chat template."""
        if self.tokenizer.chat_template is None:
            token_ids: list[int] = self.tokenizer.encode(prompt)
            return token_ids
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        token_ids = self.tokenizer.encode(str(text), add_special_tokens=False)
        return token_ids
