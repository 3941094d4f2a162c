"""An environment whose reward is a reward model's score of the completion (RLHF).

    prompt --policy--> completion, token by token --reward model--> score, on the last token

The KL penalty of a token is `kl_coef` * (log pi - log ref). The training loop applies it, because
the environment does not have the policy's log-probs. `train_agent` applies it with the starting
policy as the reference. A custom loop gets log ref from `ref_logprobs`. (Gymformer's environment
compares the reference model with itself, shifted by one token.)

The token limit ends the episode like an EOS token: an unfinished completion is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ludus.proto.config.section import NonNegativeFloat
from ludus.proto.errors import ConfigError
from ludus.trainer.algorithms.losses import token_logprobs
from ludus.trainer.compat.checks import check_value, rename_in_errors, require_device
from ludus.trainer.compat.gymformer.env.token_env import TokenEnv
from ludus.trainer.data.rows import read_rows
from ludus.trainer.models.load import load_language_model
from ludus.trainer.reward_model.model import load_reward_model

ScoreFunction = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""A function of prompts and completions that returns scores."""

_PROMPT_COLUMNS = ("prompt", "query")


class RLHFEnv(TokenEnv):
    """An environment of prompts. Each step takes one token; a reward model scores the completion.

    Args:
        ref_model_name: Hugging Face id or folder of the reference model and of the tokenizer.
        reward_model: Hugging Face id or folder of a reward model (`train_reward` writes one), or
            a function of prompts and completions that returns scores.
        dataset: a list of prompts, or a file or folder with a column prompt or query.
        kl_coef: coefficient of the KL penalty, for the training loop.
        max_generation: maximum number of tokens per completion.
        device: device of the reward model and the reference model. None uses a GPU if there is
            one.
        seed: seed of the first episode if `reset` gets no seed.

    Raises:
        NotFoundError: a model or the data set does not exist.
        ConfigError: an argument or the data set is invalid.
    """

    model_argument = "ref_model_name"

    def __init__(
        self,
        ref_model_name: str,
        reward_model: str | Path | ScoreFunction,
        dataset: str | Path | Sequence[str],
        kl_coef: float = 0.01,
        max_generation: int = 64,
        device: str | None = None,
        seed: int = 42,
    ) -> None:
        super().__init__(ref_model_name, max_generation, seed)
        if isinstance(reward_model, Path):
            reward_model = str(reward_model)
        if not isinstance(reward_model, str) and not callable(reward_model):
            raise ConfigError(
                "reward_model must be a folder or a function of prompts and completions, got "
                f"{reward_model!r:.80}"
            )
        self.kl_coef: float = check_value("kl_coef", NonNegativeFloat, kl_coef)
        self._reward_model = reward_model
        self._device = require_device(device)
        with rename_in_errors({"data": "dataset"}):
            self._prompts = _load_prompts(dataset)
        self._prompt = self._prompts[0]

    def ref_logprobs(self) -> Tensor:
        """Return the reference model's log-probs of the A tokens of the completion, float32 [A]."""
        model = _load_cached_reference_model(self.model_name, self._device)
        token_ids = torch.tensor([self._state], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits.float()
        logprobs = token_logprobs(logits, token_ids[:, 1:])[0]
        return logprobs[self._num_prompt_tokens - 1 :].cpu()

    def kl_rewards(self, logprobs: Tensor) -> Tensor:
        """Return the KL penalty of each token, [A], from the policy's `logprobs` [A].

        The penalty is -kl_coef * (log pi - log ref), arXiv 2203.02155.
        """
        return self.kl_coef * (self.ref_logprobs() - logprobs)

    def _start_episode(self, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._prompt = self._prompts[int(self.np_random.integers(len(self._prompts)))]
        return self._prompt, {}

    def _score(self, answer: str) -> float:
        scores = self._score_function([self._prompt], [answer])
        try:
            [score] = map(float, scores)
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise ConfigError(
                "reward_model must return a list of one finite score for one completion, got "
                f"{scores!r:.80}"
            )
        return score

    @property
    def _score_function(self) -> ScoreFunction:
        if isinstance(self._reward_model, str):
            with rename_in_errors({"path": "reward_model"}):
                return _load_cached_reward_model(self._reward_model, device=self._device).score
        return self._reward_model


_load_cached_reward_model = lru_cache(maxsize=4)(load_reward_model)
"""Function that loads a reward model, which all environments of this process share."""


@lru_cache(maxsize=2)
def _load_cached_reference_model(path: str, device: str | None) -> PreTrainedModel:
    model = load_language_model(path)
    device_name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(torch.device(device_name)).eval()


def _load_prompts(dataset: Any) -> tuple[str, ...]:
    if isinstance(dataset, (str, Path)):
        return _read_prompts(str(dataset))
    prompts = tuple(dataset) if isinstance(dataset, Iterable) else ()
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError(
            f"dataset must be a path or a non-empty list of strings, got {dataset!r:.80}"
        )
    return prompts


@lru_cache(maxsize=4)
def _read_prompts(path: str) -> tuple[str, ...]:
    prompts = tuple(dict.fromkeys(_iterate_prompts(path)))
    if not prompts:
        raise ConfigError(f"dataset = '{path}' has no prompts; add at least one")
    return prompts


def _iterate_prompts(path: str) -> Iterator[str]:
    for row in read_rows(Path(path)):
        prompt = next((row.columns[name] for name in _PROMPT_COLUMNS if name in row.columns), None)
        if not isinstance(prompt, str):
            raise ConfigError(
                f"{row.location}: column {' or '.join(_PROMPT_COLUMNS)} must contain a string, got "
                f"columns {', '.join(row.columns)}"
            )
        yield prompt
