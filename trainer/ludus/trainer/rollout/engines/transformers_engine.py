"""An engine that samples with Hugging Face transformers; the fastest for tiny models on a CPU.

Prompts of equal length form a batch without padding, and equal prompts are evaluated only once.
This is efficient for the episodes of a group, which start with the same tokens.

Each next token is drawn by inverse transform sampling:

    logits --legal answers--> --repetition penalty--> --temperature--> log-probs
        --min_p, top_k, top_p--> cut-off log-probs --uniform number--> token

Each token is determined by one random number, which depends only on the request's seed and the
token's position. A token therefore does not depend on the other rows of the batch. As in vLLM, each
cut applies to the renormalized distribution that remains after the previous cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ludus.trainer.algorithms.losses import token_logprobs
from ludus.trainer.core.interfaces import EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.streams import draw_uniforms
from ludus.trainer.core.types import Sampling, ScoringRequest
from ludus.trainer.rollout.engines.restriction import restrict_logits


@dataclass(slots=True)
class _Completion:
    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TransformersEngine:
    """An engine in this process, in which each step completes all requests of one prompt length."""

    def __init__(
        self, model: PreTrainedModel, *, end_token_ids: Collection[int], max_batch_size: int = 1024
    ) -> None:
        self.model = model.eval()
        self._device = model.device
        self._end_token_ids = frozenset(end_token_ids)
        self._max_batch_size = max_batch_size
        self._queues: dict[int, list[EngineRequest]] = defaultdict(list)
        """Waiting requests by prompt length, ordered by the first request of each length."""

    @property
    def has_work(self) -> bool:
        return bool(self._queues)

    def submit(self, request: EngineRequest) -> None:
        """Add a request to the queue of its prompt length."""
        self._queues[len(request.prompt_ids)].append(request)

    def abort(self, request_ids: Collection[int]) -> None:
        """Remove queued requests. Requests in the current batch are completed with it."""
        for prompt_length, requests in list(self._queues.items()):
            queue = [request for request in requests if request.request_id not in request_ids]
            if queue:
                self._queues[prompt_length] = queue
            else:
                del self._queues[prompt_length]

    @torch.inference_mode()
    def step(self) -> list[EngineOutput]:
        """Complete the queued requests that have the same prompt length as the oldest request.

        With the most common length instead, episodes with longer prompts would wait as long as new
        episodes with shorter prompts start.
        """
        prompt_length = next(iter(self._queues))
        requests = self._queues.pop(prompt_length)
        if queue := requests[self._max_batch_size :]:
            self._queues[prompt_length] = queue
        batch = [_Completion(request) for request in requests[: self._max_batch_size]]
        return list(self._complete(batch))

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

    def _complete(self, batch: list[_Completion]) -> Iterator[EngineOutput]:
        unique_prompts, prompt_rows = _find_unique_prompts(batch)
        cache = DynamicCache(config=self.model.config)
        token_ids = torch.tensor(unique_prompts, device=self._device)
        logits = self._forward(token_ids, cache)[prompt_rows]
        cache.batch_select_indices(prompt_rows)
        while True:
            token_ids, logprobs = self._sample(logits, batch)
            finished_rows: list[int] = []
            kept_rows: list[int] = []
            sampled_tokens = zip(batch, token_ids.tolist(), logprobs.tolist(), strict=True)
            for row, (completion, token_id, logprob) in enumerate(sampled_tokens):
                completion.token_ids.append(token_id)
                completion.logprobs.append(logprob)
                (finished_rows if self._is_finished(completion) else kept_rows).append(row)
            yield from (self._make_output(batch[row]) for row in finished_rows)
            if not kept_rows:
                return
            if finished_rows:
                kept_row_tensor = torch.tensor(kept_rows, device=self._device)
                cache.batch_select_indices(kept_row_tensor)
                token_ids = token_ids[kept_row_tensor]
                batch = [batch[row] for row in kept_rows]
            logits = self._forward(token_ids[:, None], cache)

    def _forward(self, token_ids: Tensor, cache: DynamicCache) -> Tensor:
        """Return the logits of the next token, [rows, vocabulary]."""
        arguments = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(input_ids=token_ids, **arguments).logits[:, -1].float()

    def _sample(self, logits: Tensor, batch: Sequence[_Completion]) -> tuple[Tensor, Tensor]:
        # All completions of a batch have the same number of tokens.
        position = len(batch[0].token_ids)
        seeds = [completion.request.seed for completion in batch]
        uniforms = torch.from_numpy(draw_uniforms(seeds, [position] * len(seeds))).to(self._device)
        samplings = [completion.request.sampling for completion in batch]
        restrictions = {
            row: (completion.request.answers, completion.token_ids)
            for row, completion in enumerate(batch)
            if completion.request.answers is not None
        }
        logits = restrict_logits(logits, restrictions)
        if all(sampling.repetition_penalty == 1 for sampling in samplings):
            return sample_tokens(logits, samplings, uniforms)
        contexts = [[*completion.request.prompt_ids, *completion.token_ids] for completion in batch]
        return sample_tokens(logits, samplings, uniforms, contexts)

    def _is_finished(self, completion: _Completion) -> bool:
        is_full = len(completion.token_ids) >= completion.request.sampling.max_tokens
        return is_full or completion.token_ids[-1] in self._end_token_ids

    def _make_output(self, completion: _Completion) -> EngineOutput:
        token_ids, request_id = completion.token_ids, completion.request.request_id
        has_end_token = token_ids[-1] in self._end_token_ids
        return EngineOutput(request_id, token_ids, completion.logprobs, has_end_token)


def _find_unique_prompts(batch: Sequence[_Completion]) -> tuple[list[list[int]], Tensor]:
    """Return the distinct prompts, and the index of each completion's prompt among them."""
    row_by_prompt: dict[tuple[int, ...], int] = {}
    prompt_rows = [
        row_by_prompt.setdefault(tuple(completion.request.prompt_ids), len(row_by_prompt))
        for completion in batch
    ]
    return [list(prompt) for prompt in row_by_prompt], torch.tensor(prompt_rows)


def sample_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    uniforms: Tensor,
    contexts: Sequence[Sequence[int]] = (),
) -> tuple[Tensor, Tensor]:
    """Return [N] token ids and [N] log-probs under the distribution they were drawn from.

    Args:
        logits: [N, V] float32.
        samplings: [N]
        uniforms: [N] float32 in [0, 1).
        contexts: [N] tokens of the prompt and the completion so far, for repetition penalties.
    """
    logits = _penalize_repetition(logits, samplings, contexts)
    temperatures = logits.new_tensor([sampling.temperature for sampling in samplings])[:, None]
    is_greedy = temperatures[:, 0] == 0
    logprobs = torch.log_softmax(logits / torch.where(temperatures == 0, 1.0, temperatures), dim=-1)
    # Greedy rows use the most likely token, with its log-prob in the uncut distribution.
    cut_rows = [
        row
        for row, sampling in enumerate(samplings)
        if sampling.excludes_tokens and sampling.temperature > 0
    ]
    if cut_rows:
        logprobs[cut_rows] = _cut_tokens(logprobs[cut_rows], [samplings[row] for row in cut_rows])
    token_ids = _draw_tokens(logprobs.exp(), uniforms)
    if bool(is_greedy.any()):
        token_ids = torch.where(is_greedy, logprobs.argmax(dim=-1), token_ids)
    return token_ids, logprobs.gather(1, token_ids[:, None])[:, 0]


def _draw_tokens(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return [N] the first token whose cumulative probability exceeds the random number."""
    cumulative_probabilities = probabilities.cumsum(dim=-1)
    total_probability = cumulative_probabilities[:, -1]
    # The target must be below the total. Otherwise rounding could select an impossible token.
    max_target = torch.nextafter(total_probability, torch.zeros_like(total_probability))
    targets = torch.minimum(uniforms * total_probability, max_target)
    return torch.searchsorted(cumulative_probabilities, targets[:, None], right=True)[:, 0]


def _penalize_repetition(
    logits: Tensor, samplings: Sequence[Sampling], contexts: Sequence[Sequence[int]]
) -> Tensor:
    """Return [N, V] logits with penalties for repeated tokens (arXiv 1909.05858, section 4.1)."""
    rows = [row for row, sampling in enumerate(samplings) if sampling.repetition_penalty != 1]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        tokens = torch.tensor(sorted(set(contexts[row])), dtype=torch.int64, device=logits.device)
        penalty, repeated_logits = samplings[row].repetition_penalty, logits[row, tokens]
        logits[row, tokens] = torch.where(
            repeated_logits > 0, repeated_logits / penalty, repeated_logits * penalty
        )
    return logits


def _cut_tokens(logprobs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return [N, V] log-probs after each row's cuts; -inf for tokens that were cut off."""

    def make_column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=logprobs.device)[:, None]

    vocabulary_size = logprobs.shape[1]
    min_p = make_column([sampling.min_p for sampling in samplings])
    top_k = make_column([sampling.top_k or vocabulary_size for sampling in samplings])
    top_p = make_column([sampling.top_p for sampling in samplings])
    probabilities, token_ids = logprobs.exp().sort(dim=-1, descending=True)
    is_kept = probabilities >= min_p * probabilities[:, :1]
    is_kept &= torch.arange(vocabulary_size, device=logprobs.device) < top_k
    kept_probabilities = torch.where(is_kept, probabilities, 0.0)
    kept_probabilities /= kept_probabilities.sum(dim=-1, keepdim=True)
    # A token is kept if the probabilities of the more likely tokens sum to less than top_p.
    is_kept &= kept_probabilities.cumsum(dim=-1) - kept_probabilities < top_p
    is_dropped = torch.zeros_like(is_kept).scatter(1, token_ids, ~is_kept)
    return torch.log_softmax(logprobs.masked_fill(is_dropped, -torch.inf), dim=-1)
