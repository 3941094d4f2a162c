"""An engine that samples with Hugging Face transformers; the fastest for tiny models on a CPU.

Prompts of equal length form a batch without padding, and equal prompts are evaluated only once.
This is efficient for the episodes of a group, which start with the same tokens.

Each next token is drawn by inverse transform sampling:

    logits --repetition penalty--> --temperature--> log-probs --min_p, top_k, top_p-->
        cut-off log-probs --uniform number--> token

Each token is determined by one random number, which depends only on the request's seed and the
token's position. A token therefore does not depend on the other rows of the batch. As in vLLM, each
cut applies to the renormalized distribution that remains after the previous cut.
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
class _SampledSequence:
    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TransformersEngine:
    """An engine in this process, in which each step completes all requests of one prompt length."""

    def __init__(
        self, model: PreTrainedModel, *, end_token_id: int, max_batch_size: int = 1024
    ) -> None:
        self.model = model.eval()
        self._device = model.device
        self._end_token_id = end_token_id
        self._max_batch_size = max_batch_size
        self._requests_by_length: dict[int, list[EngineRequest]] = defaultdict(list)

    @property
    def has_work(self) -> bool:
        return bool(self._requests_by_length)

    def submit(self, request: EngineRequest) -> None:
        """Add a request to the queue of its prompt length."""
        self._requests_by_length[len(request.prompt_ids)].append(request)

    def abort(self, request_ids: Collection[int]) -> None:
        """Remove queued requests. Requests in the current batch are completed with it."""
        for prompt_length, requests in list(self._requests_by_length.items()):
            remaining_requests = [
                request for request in requests if request.request_id not in request_ids
            ]
            if remaining_requests:
                self._requests_by_length[prompt_length] = remaining_requests
            else:
                del self._requests_by_length[prompt_length]

    @torch.inference_mode()
    def step(self) -> list[EngineOutput]:
        """Complete the queued requests that have the same prompt length as the oldest request.

        With the most common length instead, episodes with longer prompts would wait as long as new
        episodes with shorter prompts start.
        """
        prompt_length = next(
            iter(self._requests_by_length)
        )  # lengths are ordered by their first request
        requests = self._requests_by_length.pop(prompt_length)
        if remaining_requests := requests[self._max_batch_size :]:
            self._requests_by_length[prompt_length] = remaining_requests
        return list(
            self._complete(
                [_SampledSequence(request) for request in requests[: self._max_batch_size]]
            )
        )

    def load_weights(self, state: StateDict) -> None:
        with torch.no_grad():
            parameters = self.model.state_dict(keep_vars=True)
            for name, tensor in state.items():
                parameters[name].copy_(tensor)

    @torch.inference_mode()
    def score(self, request: ScoringRequest) -> list[float]:
        """Return the log-probs of the request's completion at temperature 1."""
        token_ids = torch.tensor([request.prompt_ids + request.completion_ids], device=self._device)
        num_tokens = len(request.completion_ids)
        logits = self.model(input_ids=token_ids[:, :-1], logits_to_keep=num_tokens).logits
        return token_logprobs(logits.float(), token_ids[:, -num_tokens:])[0].tolist()

    def close(self) -> None:
        """Do nothing: the process frees the model when it exits."""

    def _complete(self, sequences: list[_SampledSequence]) -> Iterator[EngineOutput]:
        unique_prompts, prompt_rows = _find_unique_prompts(sequences)
        cache = DynamicCache(config=self.model.config)
        token_ids = torch.tensor(unique_prompts, device=self._device)
        logits = self._forward(token_ids, cache)[prompt_rows]
        cache.batch_select_indices(prompt_rows)
        active_sequences = sequences
        while True:
            token_ids, logprobs = self._sample(logits, active_sequences)
            finished_rows: list[int] = []
            kept_rows: list[int] = []
            sampled_tokens = zip(
                active_sequences, token_ids.tolist(), logprobs.tolist(), strict=True
            )
            for row, (sequence, token_id, logprob) in enumerate(sampled_tokens):
                sequence.token_ids.append(token_id)
                sequence.logprobs.append(logprob)
                (finished_rows if self._is_finished(sequence) else kept_rows).append(row)
            yield from (self._make_output(active_sequences[row]) for row in finished_rows)
            if not kept_rows:
                return
            if finished_rows:
                kept_row_tensor = torch.tensor(kept_rows, device=self._device)
                cache.batch_select_indices(kept_row_tensor)
                token_ids = token_ids[kept_row_tensor]
                active_sequences = [active_sequences[row] for row in kept_rows]
            logits = self._forward(token_ids[:, None], cache)

    def _forward(self, token_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the logits of the next token, [rows, vocabulary]."""
        model_output = self.model(
            input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return model_output.logits[:, -1].float()

    def _sample(
        self, logits: torch.Tensor, sequences: Sequence[_SampledSequence]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # All sequences of a batch have sampled the same number of tokens.
        position = len(sequences[0].token_ids)
        seeds = [sequence.request.seed for sequence in sequences]
        uniforms = torch.from_numpy(draw_uniforms(seeds, [position] * len(seeds))).to(self._device)
        samplings = [sequence.request.sampling for sequence in sequences]
        if all(sampling.repetition_penalty == 1 for sampling in samplings):
            return sample_tokens(logits, samplings, uniforms)
        contexts = [[*sequence.request.prompt_ids, *sequence.token_ids] for sequence in sequences]
        return sample_tokens(logits, samplings, uniforms, contexts)

    def _is_finished(self, sequence: _SampledSequence) -> bool:
        is_full = len(sequence.token_ids) >= sequence.request.sampling.max_tokens
        return is_full or sequence.token_ids[-1] == self._end_token_id

    def _make_output(self, sequence: _SampledSequence) -> EngineOutput:
        has_end_token = sequence.token_ids[-1] == self._end_token_id
        return EngineOutput(
            sequence.request.request_id, sequence.token_ids, sequence.logprobs, has_end_token
        )


def _find_unique_prompts(
    sequences: Sequence[_SampledSequence],
) -> tuple[list[list[int]], torch.Tensor]:
    """Return the distinct prompts, and the index of each sequence's prompt among them."""
    row_by_prompt: dict[tuple[int, ...], int] = {}
    prompt_rows = [
        row_by_prompt.setdefault(tuple(sequence.request.prompt_ids), len(row_by_prompt))
        for sequence in sequences
    ]
    return [list(prompt) for prompt in row_by_prompt], torch.tensor(prompt_rows)


def sample_tokens(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    uniforms: torch.Tensor,
    contexts: Sequence[Sequence[int]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N] token ids and [N] log-probs under the distribution they were drawn from.

    Args:
        logits: [N, V] float32.
        samplings: [N]
        uniforms: [N] float32 in [0, 1).
        contexts: [N] tokens of the prompt and the completion so far, for repetition penalties.
    """
    logits = _penalize_repetition(logits, samplings, contexts)
    temperatures = torch.tensor(
        [sampling.temperature for sampling in samplings], device=logits.device
    )[:, None]
    is_greedy = temperatures[:, 0] == 0
    logprobs = torch.log_softmax(logits / torch.where(temperatures == 0, 1.0, temperatures), dim=-1)
    # Greedy rows use the most likely token, with its log-prob in the uncut distribution.
    cut_rows = [
        row
        for row, sampling in enumerate(samplings)
        if sampling.excludes_tokens and sampling.temperature > 0
    ]
    if cut_rows:
        logprobs[cut_rows] = _cut_unlikely_tokens(
            logprobs[cut_rows], [samplings[row] for row in cut_rows]
        )
    token_ids = _draw_tokens(logprobs.exp(), uniforms)
    if bool(is_greedy.any()):
        token_ids = torch.where(is_greedy, logprobs.argmax(dim=-1), token_ids)
    return token_ids, logprobs.gather(1, token_ids[:, None])[:, 0]


def _draw_tokens(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return [N] the first token whose cumulative probability exceeds the random number."""
    cumulative_probabilities = probabilities.cumsum(dim=-1)
    total_probability = cumulative_probabilities[:, -1]
    # The target must be below the total. Otherwise rounding could select an impossible token.
    max_target = torch.nextafter(total_probability, torch.zeros_like(total_probability))
    targets = torch.minimum(uniforms * total_probability, max_target)
    return torch.searchsorted(cumulative_probabilities, targets[:, None], right=True)[:, 0]


def _penalize_repetition(
    logits: torch.Tensor, samplings: Sequence[Sampling], contexts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return [N, V] logits with penalties for repeated tokens (arXiv 1909.05858, section 4.1)."""
    penalized_rows = [
        row for row, sampling in enumerate(samplings) if sampling.repetition_penalty != 1
    ]
    if not penalized_rows:
        return logits
    logits = logits.clone()
    for row in penalized_rows:
        token_ids = torch.tensor(
            sorted(set(contexts[row])), dtype=torch.int64, device=logits.device
        )
        penalty, repeated_logits = samplings[row].repetition_penalty, logits[row, token_ids]
        logits[row, token_ids] = torch.where(
            repeated_logits > 0, repeated_logits / penalty, repeated_logits * penalty
        )
    return logits


def _cut_unlikely_tokens(logprobs: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return [N, V] log-probs after each row's cuts; -inf for tokens that were cut off."""

    def make_column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=logprobs.device)[:, None]

    sorted_probabilities, token_ids = logprobs.exp().sort(dim=-1, descending=True)
    is_kept = (
        sorted_probabilities
        >= make_column([sampling.min_p for sampling in samplings]) * sorted_probabilities[:, :1]
    )
    ranks = torch.arange(sorted_probabilities.shape[1], device=logprobs.device)[None]
    is_kept &= ranks < make_column(
        [sampling.top_k or sorted_probabilities.shape[1] for sampling in samplings]
    )
    kept_probabilities = torch.where(is_kept, sorted_probabilities, 0.0)
    kept_probabilities /= kept_probabilities.sum(dim=-1, keepdim=True)
    # A token is kept if the probabilities of the more likely tokens sum to less than top_p.
    is_kept &= kept_probabilities.cumsum(dim=-1) - kept_probabilities < make_column(
        [sampling.top_p for sampling in samplings]
    )
    is_dropped = torch.zeros_like(is_kept).scatter(1, token_ids, ~is_kept)
    return torch.log_softmax(logprobs.masked_fill(is_dropped, -torch.inf), dim=-1)
