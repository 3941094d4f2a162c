"""Completions of a run's policy, with log-probs under the policy and under its initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ludus.proto.config import TinyModel
from ludus.proto.runs import CHECKPOINTS_FOLDER
from ludus.trainer.algorithms.losses import token_logprobs
from ludus.trainer.core.interfaces import EngineRequest
from ludus.trainer.core.streams import mix
from ludus.trainer.core.types import Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_language_model
from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine
from ludus.trainer.run.checkpoint import MODEL_FOLDER, find_newest_checkpoint

_START = "initial_model"


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion of a policy."""

    prompt: str
    text: str
    logprob: float
    """Log-prob of the whole completion under the policy."""
    ref_logprob: float
    """Log-prob of the whole completion under the run's initial policy."""


class Sampler:
    """Samples from the final weights of a run, or from its initial weights."""

    def __init__(self, run: Path, *, trained: bool = True) -> None:
        model = find_newest_checkpoint(run / CHECKPOINTS_FOLDER) / MODEL_FOLDER if trained else None
        self._chat = ChatTokenizer.load(str(run / _START), TinyModel())
        self._start = load_language_model(run / _START).eval()
        self._engine = TransformersEngine(
            load_language_model(model or run / _START), end_token_ids=self._chat.end_token_ids
        )

    def answers(self, prompts: Sequence[str], num_each: int, max_tokens: int) -> list[Answer]:
        """Return `num_each` completions of each prompt, sampled at temperature 1."""
        sampling = Sampling(1.0, max_tokens)
        requests: list[tuple[str, list[int]]] = []
        for prompt in prompts:
            token_ids = self._chat.encode_first_prompt([{"role": "user", "content": prompt}])
            requests += [(prompt, token_ids)] * num_each
        for number, (_, token_ids) in enumerate(requests):
            self._engine.submit(EngineRequest(number, token_ids, sampling, mix(7, number)))
        answers: dict[int, Answer] = {}
        while self._engine.has_work:
            for output in self._engine.step():
                prompt, prompt_ids = requests[output.request_id]
                answers[output.request_id] = Answer(
                    prompt,
                    self._chat.decode(output.token_ids),
                    sum(output.logprobs),
                    _logprob(self._start, prompt_ids, output.token_ids),
                )
        return [answers[number] for number in range(len(requests))]


@torch.no_grad()
def _logprob(model: PreTrainedModel, prompt_ids: Sequence[int], completion: Sequence[int]) -> float:
    token_ids = torch.tensor([[*prompt_ids, *completion]])
    logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits.float()
    logprobs = token_logprobs(logits, token_ids[:, 1:])
    return float(logprobs[0, len(prompt_ids) - 1 :].sum())
