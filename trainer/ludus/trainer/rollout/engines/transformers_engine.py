"""An engine that samples with Hugging Face transformers; the fastest for tiny models on a CPU.

Prompts of equal length form a batch without padding, and equal prompts are computed once. The
episodes of a group with one seed start with the same tokens, so they share most of a batch.

Each next token is drawn by inverse transform sampling:

    logits --repetition penalty--> --temperature--> log-probs --min_p, top_k, top_p-->
        cut-off log-probs --uniform number--> token

One random number, which depends only on the request's seed and the token's position, determines a
row's token, so the token does not depend on the other rows. The cuts have the same order as in
vLLM: each one applies to the renormalized distribution that the previous cut left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from ludus.trainer.algorithms.losses import token_logprobs
from ludus.trainer.core.interfaces import EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.streams import draw_uniforms
from ludus.trainer.core.types import Sampling, ScoringRequest


@dataclass(slots=True)
class _Sequence:
    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TransformersEngine:
    """One model in this process; each step completes the waiting requests of one length."""

    def __init__(
        self, model: PreTrainedModel, *, end_token_id: int, max_batch_size: int = 1024
    ) -> None:
        self.model = model.eval()
        self._device = model.device
        self._end_token_id = end_token_id
        self._max_batch_size = max_batch_size
        self._waiting: dict[int, list[EngineRequest]] = defaultdict(list)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def submit(self, request: EngineRequest) -> None:
        """Queue the request until the requests of its length are completed."""
        self._waiting[len(request.prompt_ids)].append(request)

    def abort(self, request_ids: Collection[int]) -> None:
        """Remove queued requests; a request in the current batch is completed with its batch."""
        for length, requests in list(self._waiting.items()):
            queue = [request for request in requests if request.request_id not in request_ids]
            if queue:
                self._waiting[length] = queue
            else:
                del self._waiting[length]

    @torch.inference_mode()
    def step(self) -> list[EngineOutput]:
        """Complete the queued requests whose length is that of the oldest one.

        If the most common length were taken, episodes with longer prompts would wait while new
        episodes with shorter prompts keep starting.
        """
        length = next(iter(self._waiting))  # lengths are ordered by their first request
        requests = self._waiting.pop(length)
        if queue := requests[self._max_batch_size :]:
            self._waiting[length] = queue
        return list(self._complete([_Sequence(r) for r in requests[: self._max_batch_size]]))

    def load_weights(self, state: StateDict) -> None:
        with torch.no_grad():
            parameters = self.model.state_dict(keep_vars=True)
            for name, tensor in state.items():
                parameters[name].copy_(tensor)

    @torch.inference_mode()
    def score(self, request: ScoringRequest) -> list[float]:
        """Return the log-probs of the request's completion at temperature 1."""
        ids = torch.tensor([request.prompt_ids + request.completion_ids], device=self._device)
        num_tokens = len(request.completion_ids)
        logits = self.model(input_ids=ids[:, :-1], logits_to_keep=num_tokens).logits
        return token_logprobs(logits.float(), ids[:, -num_tokens:])[0].tolist()

    def close(self) -> None:
        """Do nothing: the process frees the model when it exits."""

    def _complete(self, sequences: list[_Sequence]) -> Iterator[EngineOutput]:
        unique, rows = _unique_prompts(sequences)
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor(unique, device=self._device)
        logits = self._forward(ids, cache)[rows]
        cache.batch_select_indices(rows)
        alive = sequences
        while True:
            ids, logprobs = self._sample(logits, alive)
            finished: list[int] = []
            kept: list[int] = []
            columns = zip(alive, ids.tolist(), logprobs.tolist(), strict=True)
            for row, (sequence, token_id, logprob) in enumerate(columns):
                sequence.token_ids.append(token_id)
                sequence.logprobs.append(logprob)
                (finished if self._is_finished(sequence) else kept).append(row)
            yield from (self._output(alive[row]) for row in finished)
            if not kept:
                return
            if finished:
                kept_rows = torch.tensor(kept, device=self._device)
                cache.batch_select_indices(kept_rows)
                ids = ids[kept_rows]
                alive = [alive[row] for row in kept]
            logits = self._forward(ids[:, None], cache)

    def _forward(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the logits of the next token, [rows, vocabulary]."""
        output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float()

    def _sample(
        self, logits: torch.Tensor, sequences: Sequence[_Sequence]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # All sequences of a batch have sampled the same number of tokens.
        position = len(sequences[0].token_ids)
        seeds = [sequence.request.seed for sequence in sequences]
        numbers = torch.from_numpy(draw_uniforms(seeds, [position] * len(seeds))).to(self._device)
        samplings = [sequence.request.sampling for sequence in sequences]
        if all(sampling.repetition_penalty == 1 for sampling in samplings):
            return sample_tokens(logits, samplings, numbers)
        context = [[*sequence.request.prompt_ids, *sequence.token_ids] for sequence in sequences]
        return sample_tokens(logits, samplings, numbers, context)

    def _is_finished(self, sequence: _Sequence) -> bool:
        is_full = len(sequence.token_ids) >= sequence.request.sampling.max_tokens
        return is_full or sequence.token_ids[-1] == self._end_token_id

    def _output(self, sequence: _Sequence) -> EngineOutput:
        has_stopped = sequence.token_ids[-1] == self._end_token_id
        return EngineOutput(
            sequence.request.request_id, sequence.token_ids, sequence.logprobs, has_stopped
        )


def _unique_prompts(sequences: Sequence[_Sequence]) -> tuple[list[list[int]], torch.Tensor]:
    """Return the distinct prompts, and the row of each sequence's prompt among them."""
    row_by_prompt: dict[tuple[int, ...], int] = {}
    rows = [
        row_by_prompt.setdefault(tuple(sequence.request.prompt_ids), len(row_by_prompt))
        for sequence in sequences
    ]
    return [list(prompt) for prompt in row_by_prompt], torch.tensor(rows)


def sample_tokens(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    uniforms: torch.Tensor,
    context: Sequence[Sequence[int]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N] token ids and [N] log-probs under the distribution they were drawn from.

    Args:
        logits: [N, V] float32.
        samplings: [N]
        uniforms: [N] float32 in [0, 1).
        context: [N] previous tokens with the prompt; used for repetition penalties only.
    """
    logits = _penalize(logits, samplings, context)
    temperature = torch.tensor([s.temperature for s in samplings], device=logits.device)[:, None]
    is_greedy = temperature[:, 0] == 0
    logprobs = torch.log_softmax(logits / torch.where(temperature == 0, 1.0, temperature), dim=-1)
    # Greedy rows take the most likely token; their log-prob is that of the uncut distribution.
    cut_rows = [row for row, s in enumerate(samplings) if s.excludes_tokens and s.temperature > 0]
    if cut_rows:
        logprobs[cut_rows] = _cut_off(logprobs[cut_rows], [samplings[row] for row in cut_rows])
    token_ids = _draw(logprobs.exp(), uniforms)
    if bool(is_greedy.any()):
        token_ids = torch.where(is_greedy, logprobs.argmax(dim=-1), token_ids)
    return token_ids, logprobs.gather(1, token_ids[:, None])[:, 0]


def _draw(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return [N] the first token whose cumulative probability exceeds the random number."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1]
    # The target must be below the total, or rounding could select an impossible last token.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms * total, below)
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _penalize(
    logits: torch.Tensor, samplings: Sequence[Sampling], context: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return [N, V] logits with penalties for repeated tokens (arXiv 1909.05858, section 4.1)."""
    rows = [row for row, s in enumerate(samplings) if s.repetition_penalty != 1]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        ids = torch.tensor(sorted(set(context[row])), dtype=torch.int64, device=logits.device)
        penalty, repeated = samplings[row].repetition_penalty, logits[row, ids]
        logits[row, ids] = torch.where(repeated > 0, repeated / penalty, repeated * penalty)
    return logits


def _cut_off(logprobs: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return [N, V] log-probs over the tokens that each row's cuts keep; -inf for the others."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=logprobs.device)[:, None]

    ordered, token_ids = logprobs.exp().sort(dim=-1, descending=True)
    is_kept = ordered >= column([s.min_p for s in samplings]) * ordered[:, :1]
    rank = torch.arange(ordered.shape[1], device=logprobs.device)[None]
    is_kept &= rank < column([s.top_k or ordered.shape[1] for s in samplings])
    shares = torch.where(is_kept, ordered, 0.0)
    shares /= shares.sum(dim=-1, keepdim=True)
    # A token is kept if the more likely tokens have less than top_p together.
    is_kept &= shares.cumsum(dim=-1) - shares < column([s.top_p for s in samplings])
    is_dropped = torch.zeros_like(is_kept).scatter(1, token_ids, ~is_kept)
    return torch.log_softmax(logprobs.masked_fill(is_dropped, -torch.inf), dim=-1)
