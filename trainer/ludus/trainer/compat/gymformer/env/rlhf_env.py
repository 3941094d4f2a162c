"""Answers to prompts that a reward model scores: the environment of learning from preferences.

    prompt --policy--> answer, token by token --reward model--> its score, on the last token

What holds the policy near its reference belongs to whoever trains it, since only the policy knows
its own log-probs: k1 = log pi - log ref of each token, times `kl_coef`. `train_agent` does so, with
the starting policy as the reference; a loop of your own finds log ref here (`ref_logprobs`).
(Gymformer's environment compares the reference with itself, one token on.)

A limit of tokens ends the episode as an end token does: the answer is scored as it stands.
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

from ludus.proto.errors import ConfigError
from ludus.trainer.algorithms.logits import token_logprobs
from ludus.trainer.compat.gymformer.arguments import check_number, device_in, told_as
from ludus.trainer.compat.gymformer.env.token_env import Ending, TokenEnv
from ludus.trainer.models.load import load_language_model
from ludus.trainer.reward_model.model import RewardModel, load_reward_model
from ludus.trainer.reward_model.rows import read_rows

ScoreFn = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""(prompts, answers) -> scores."""

_PROMPTS = ("prompt", "query")


class RLHFEnv(TokenEnv):
    """A prompt and its answer, a token a step; a reward model scores the whole.

    Args:
        ref_model_name: Hugging Face id, or folder, of the reference, whose tokenizer is used.
        reward_model: folder or id of one, as `train_reward` writes it; or a function of prompts
            and answers that returns their scores.
        dataset: prompts: a list, or a file or folder with a column prompt or query.
        kl_coef: price of the divergence from the reference, for those who train.
        max_generation: tokens of an answer.
        device: of the reward model and the reference; None takes a GPU where there is one.
        seed: of the first episode, where `reset` has none.

    Raises:
        NotFoundError: there is no such model or data set.
        ConfigError: it cannot be used.
    """

    _model_argument = "ref_model_name"

    def __init__(
        self,
        ref_model_name: str,
        reward_model: str | Path | ScoreFn,
        dataset: str | Path | Sequence[str],
        kl_coef: float = 0.01,
        max_generation: int = 64,
        device: str | None = None,
        seed: int = 42,
    ) -> None:
        super().__init__(ref_model_name, max_generation, seed)
        check_number("kl_coef", kl_coef)
        if isinstance(reward_model, Path):
            reward_model = str(reward_model)
        if not isinstance(reward_model, str) and not callable(reward_model):
            raise ConfigError(
                "reward_model expected a folder, or a function of prompts and answers, got "
                f"{reward_model!r:.80}"
            )
        self.kl_coef = kl_coef
        self._reward_model = reward_model
        self._device = device_in("device", device)
        with told_as({"data": "dataset"}):
            self._prompts = _prompts_in(dataset)
        self._prompt = self._prompts[0]

    def ref_logprobs(self) -> Tensor:
        """float32 [A] log-probs of the answer's tokens so far, under the reference."""
        model = _reference(self.model_name, self._device)
        token_ids = torch.tensor([self._state], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits.float()
        logprobs = token_logprobs(logits, token_ids[:, 1:])[0]
        return logprobs[self._num_prompt - 1 :].cpu()

    def kl_rewards(self, logprobs: Tensor) -> Tensor:
        """[A] what each token of the answer costs, of which the policy says `logprobs` [A].

        -kl_coef * (log pi - log ref), arXiv 2203.02155.
        """
        return self.kl_coef * (self.ref_logprobs() - logprobs)

    def _begin(self, seed: int | None, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._prompt = self._prompts[int(self.np_random.integers(len(self._prompts)))]
        return self._prompt, {}

    def _end(self, answer: str, *, ended: bool) -> Ending:
        scores = self._score_fn([self._prompt], [answer])
        try:
            [score] = [float(one) for one in scores]
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise ConfigError(
                "reward_model expected a list of one finite score for one answer, got "
                f"{scores!r:.80}"
            )
        return Ending(score, is_over=True)

    @property
    def _score_fn(self) -> ScoreFn:
        if isinstance(self._reward_model, str):
            with told_as({"path": "reward_model"}):
                return _loaded(self._reward_model, self._device).score
        return self._reward_model


@lru_cache(maxsize=4)
def _loaded(path: str, device: str | None) -> RewardModel:
    """The reward model of a folder: one for all environments of this process."""
    return load_reward_model(path, device=device)


@lru_cache(maxsize=2)
def _reference(path: str, device: str | None) -> PreTrainedModel:
    model = load_language_model(path)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(torch.device(chosen)).eval()


def _prompts_in(dataset: Any) -> tuple[str, ...]:
    """The prompts of a data set.

    Raises:
        NotFoundError: there is no such data set.
        ConfigError: it has none, or one that is no text.
    """
    if isinstance(dataset, (str, Path)):
        return _read_prompts(str(dataset))
    prompts = tuple(dataset) if isinstance(dataset, Iterable) else ()
    if not prompts or not all(isinstance(one, str) for one in prompts):
        raise ConfigError(
            "dataset expected a path, or at least one prompt, all of them texts, got "
            f"{dataset!r:.80}"
        )
    return prompts


@lru_cache(maxsize=4)
def _read_prompts(path: str) -> tuple[str, ...]:
    prompts = tuple(dict.fromkeys(_prompts_of(path)))
    if not prompts:
        raise ConfigError(f"dataset = '{path}' expected at least one prompt, got none")
    return prompts


def _prompts_of(path: str) -> Iterator[str]:
    for row in read_rows(Path(path)):
        prompt = next((row.values[name] for name in _PROMPTS if name in row.values), None)
        if not isinstance(prompt, str):
            raise ConfigError(
                f"{row.location}: expected a text in column {' or '.join(_PROMPTS)}, got "
                f"{', '.join(row.values)}"
            )
        yield prompt
