"""An engine that samples with Hugging Face transformers, on a CPU or one GPU.

All requests share one batch. A step samples a token for each request of the batch; completed
requests leave the batch, and waiting requests join it:

    waiting  --prefill, once for equal prompts-->  batch  --one token per step-->  outputs

Each token is determined by one random number, which depends only on the request's seed and the
token's position. A token therefore does not depend on the other requests of the batch. As soon as
only one legal answer is left, its remaining tokens follow without a pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ludus.trainer.algorithms.losses import token_logprobs
from ludus.trainer.core.interfaces import EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.streams import draw_uniforms
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.rollout.engines.decoders import make_decoder
from ludus.trainer.rollout.engines.restriction import restrict_logits
from ludus.trainer.rollout.engines.token_sampling import sample_tokens

_MIN_JOINING_SHARE = 0.125
"""Number of waiting requests, as a share of the batch, with which they join the batch at once. A
pass over a few prompts costs nearly as much as a pass over many."""
_MAX_WAITING_STEPS = 8
"""Number of steps after which waiting requests join the batch, however few they are."""


@dataclass(slots=True)
class _Completion:
    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_unread_tokens: int = 1
    """Number of the last tokens that the model has not read."""

    @property
    def sequence(self) -> list[int]:
        """Tokens of the prompt and of the completion so far."""
        return [*self.request.prompt_ids, *self.token_ids]

    @property
    def read_sequence(self) -> list[int]:
        """Tokens that the model has read, with which a completed sequence begins."""
        return self.sequence[: -self.num_unread_tokens]

    @property
    def max_length(self) -> int:
        """Number of tokens of the prompt and of the longest completion."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens until the limit."""
        return self.request.sampling.max_tokens - len(self.token_ids)

    def add_forced_tokens(self) -> None:
        """Complete the answer if only one legal answer is left; its tokens have probability 1."""
        if self.request.answers is not None:
            forced_ids = self.request.answers.find_forced_ids(self.token_ids)
            if len(forced_ids) <= self.num_tokens_left:
                self.token_ids += forced_ids
                self.logprobs += [0.0] * len(forced_ids)
                self.num_unread_tokens += len(forced_ids)


class TransformersEngine:
    """An engine in this process, in which each step samples one token for all requests."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_token_ids: Collection[int],
        max_batch_size: int = 1024,
        kv_cache_mib: int = 2048,
        prefix_cache_mib: int = 256,
    ) -> None:
        self.model = model.eval()
        self._device = model.device
        if self._device.type == "cpu":
            _transpose_weights(model)
        self._end_token_ids = frozenset(end_token_ids)
        self._max_batch_size = max_batch_size
        self._decoder = make_decoder(self.model, prefix_cache_mib * 2**20)
        self._max_batch_tokens = kv_cache_mib * 2**20 // self._decoder.bytes_per_token
        """Maximum number of sequences times the length of the longest one."""
        self._waiting: list[_Completion] = []
        """Requests that are not in the batch, from the oldest to the newest."""
        self._batch: list[_Completion] = []
        """Requests in the order of the decoder's sequences."""
        self._num_waiting_steps = 0
        """Number of steps that the oldest waiting request has waited."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._batch)

    def submit(self, request: EngineRequest) -> None:
        """Add a request to the waiting requests."""
        self._waiting.append(_Completion(request))

    @torch.inference_mode()
    def abort(self, request_ids: Collection[int]) -> None:
        """Remove requests from the queue and from the batch."""
        self._waiting = [
            completion
            for completion in self._waiting
            if completion.request.request_id not in request_ids
        ]
        kept_rows = [
            row
            for row, completion in enumerate(self._batch)
            if completion.request.request_id not in request_ids
        ]
        if len(kept_rows) < len(self._batch):
            self._keep(kept_rows, [])

    @torch.inference_mode()
    def step(self) -> list[EngineOutput]:
        """Sample a token for each request in the batch; return the completed requests."""
        logits: list[Tensor] = []
        if self._batch:
            last_ids = [completion.token_ids[-1] for completion in self._batch]
            logits.append(self._decoder.extend(last_ids))
        if joining := self._take_joining():
            max_new_tokens = max(completion.num_tokens_left for completion in joining)
            sequences = [completion.sequence for completion in joining]
            logits.append(self._decoder.add(sequences, max_new_tokens))
            self._batch += joining
        self._sample(torch.cat(logits) if len(logits) > 1 else logits[0])
        finished_rows = [
            row for row, completion in enumerate(self._batch) if self._is_finished(completion)
        ]
        outputs = [self._make_output(self._batch[row]) for row in finished_rows]
        if finished_rows:
            finished = set(finished_rows)
            kept_rows = [row for row in range(len(self._batch)) if row not in finished]
            self._keep(kept_rows, finished_rows)
        return outputs

    def load_weights(self, state: StateDict) -> None:
        """Replace the weights. Running requests continue; their keys are computed again."""
        self._waiting = [*self._batch, *self._waiting]
        self._batch = []
        self._decoder.clear()
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

    def _take_joining(self) -> list[_Completion]:
        """Remove and return the waiting requests that join the batch in this step."""
        num_free = self._max_batch_size - len(self._batch)
        if not self._waiting or num_free == 0:
            return []
        if self._batch:
            self._num_waiting_steps += 1
            is_worthwhile = len(self._waiting) >= _MIN_JOINING_SHARE * len(self._batch)
            has_waited = self._num_waiting_steps >= _MAX_WAITING_STEPS
            if not self._decoder.accepts_any_length or not (is_worthwhile or has_waited):
                return []
        self._num_waiting_steps = 0
        length = len(self._waiting[0].sequence)
        joining: list[_Completion] = []
        remaining: list[_Completion] = []
        for completion in self._waiting[: self._count_fitting()]:
            fits = self._decoder.accepts_any_length or len(completion.sequence) == length
            can_join = fits and len(joining) < num_free
            (joining if can_join else remaining).append(completion)
        self._waiting = remaining + self._waiting[len(joining) + len(remaining) :]
        return joining

    def _count_fitting(self) -> int:
        """Return the number of the oldest waiting requests that fit in memory with the batch."""
        num_rows = len(self._batch)
        longest = max((completion.max_length for completion in self._batch), default=0)
        for num_fitting, completion in enumerate(self._waiting):
            longest = max(longest, completion.max_length)
            num_rows += 1
            if num_rows > 1 and num_rows * longest > self._max_batch_tokens:
                return num_fitting
        return len(self._waiting)

    def _sample(self, logits: Tensor) -> None:
        """Append a token to each completion of the batch."""
        batch = self._batch
        seeds = [completion.request.seed for completion in batch]
        positions = [len(completion.token_ids) for completion in batch]
        uniforms = torch.from_numpy(draw_uniforms(seeds, positions)).to(self._device)
        samplings = [completion.request.sampling for completion in batch]
        restrictions = {
            row: (completion.request.answers, completion.token_ids)
            for row, completion in enumerate(batch)
            if completion.request.answers is not None
        }
        logits = restrict_logits(logits, restrictions)
        contexts: list[Sequence[int]] = []
        if any(sampling.repetition_penalty != 1 for sampling in samplings):
            contexts = [completion.sequence for completion in batch]
        token_ids, logprobs = sample_tokens(logits, samplings, uniforms, contexts)
        sampled_tokens = zip(batch, token_ids.tolist(), logprobs.tolist(), strict=True)
        for completion, token_id, logprob in sampled_tokens:
            completion.token_ids.append(token_id)
            completion.logprobs.append(logprob)
            completion.add_forced_tokens()

    def _keep(self, rows: Sequence[int], finished_rows: Sequence[int]) -> None:
        """Remove all other rows from the batch."""
        ended = [(row, self._batch[row].read_sequence) for row in finished_rows]
        self._decoder.keep(rows, ended)
        self._batch = [self._batch[row] for row in rows]

    def _is_finished(self, completion: _Completion) -> bool:
        is_full = completion.num_tokens_left <= 0
        return is_full or completion.token_ids[-1] in self._end_token_ids

    def _make_output(self, completion: _Completion) -> EngineOutput:
        token_ids, request_id = completion.token_ids, completion.request.request_id
        has_end_token = token_ids[-1] in self._end_token_ids
        return EngineOutput(request_id, token_ids, completion.logprobs, has_end_token)


@torch.no_grad()
def _transpose_weights(model: PreTrainedModel) -> None:
    """Store the weights of linear layers in the order in which a CPU multiplies few rows fastest.

    Shapes and values stay the same. Weights that are tied to the embeddings are read by row.
    """
    embeddings = model.get_input_embeddings().weight
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear) or module.weight is embeddings:
            continue
        if module.weight.dtype == torch.float32:
            module.weight.data = module.weight.data.t().contiguous().t()
