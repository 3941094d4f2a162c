"""Log-probs and entropies from a model's last hidden states, a chunk of positions at a time.

    hidden states [P, H] --> logits [C, V] of a chunk --> log-probs [E], entropies [P]

The plain computation holds five tensors of size [P, V]; the chunked computation holds at most
three of size [C, V]. The backward pass computes the logits of each chunk again, except those of the
last chunk, which are kept. So the logits of a micro-batch with one chunk are computed once.

Shapes: P = positions, H = inputs of a linear term, V = vocabulary, C = positions of a chunk, E =
targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

EntropyMode = Literal["none", "value", "gradient"]
"""Computation of the entropy: skipped, its value only, or also its gradient (slower)."""

MAX_CHUNK_LOGITS = 2**27
"""Maximum number of logits of a chunk that has several positions: 512 MiB in float32. Each chunk
adds to the whole gradient of the weight, so small chunks are probably slow on a GPU (not
measured)."""


class LogitTransform(NamedTuple):
    """The function cap * tanh(scale * x / cap) / temperature of the head's output x."""

    scale: float = 1.0
    cap: float = math.inf
    """Bound of the logits; infinity for a model without a bound."""
    temperature: float = 1.0

    @property
    def is_linear(self) -> bool:
        """True if the function is a multiplication."""
        return math.isinf(self.cap)

    @property
    def slope(self) -> float:
        """Derivative at 0."""
        return self.scale / self.temperature

    def apply(self, output: Tensor) -> Tensor:
        """Return the logits at the temperature, in float32 or float64."""
        logits = output.to(_get_sum_dtype(output))
        if self.is_linear:
            return logits if self.slope == 1 else logits * self.slope
        return (logits * (self.scale / self.cap)).tanh() * (self.cap / self.temperature)

    def compute_slopes(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of the function where it returns `logits`."""
        if self.is_linear:
            return self.slope
        relative_logits = logits * (self.temperature / self.cap)
        return relative_logits.square_().neg_().add_(1).mul_(self.slope)


class HeadTerm(NamedTuple):
    """A linear term of a head."""

    inputs: Tensor
    """[P, H]"""
    weight: Tensor
    """[V, H]"""


class HeadTerms(NamedTuple):
    """A head with its inputs, as a sum of linear terms: its layer, and one per low-rank adapter."""

    terms: Sequence[HeadTerm]
    bias: Tensor | None
    """[V]"""

    @classmethod
    def from_tensors(cls, bias: Tensor | None, tensors: Sequence[Tensor]) -> HeadTerms:
        """Return the head whose terms have these tensors: inputs and weight of each term."""
        return cls([HeadTerm(*tensors[i : i + 2]) for i in range(0, len(tensors), 2)], bias)

    def list_chunks(self) -> list[slice]:
        """Return the chunks of all positions."""
        num_positions, size = len(self.terms[0].inputs), MAX_CHUNK_LOGITS // self.vocab_size or 1
        return [
            slice(start, min(start + size, num_positions))
            for start in range(0, num_positions, size)
        ]

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return len(self.terms[0].weight)

    def compute_output(self, chunk: slice) -> Tensor:
        """Return the head's output for the positions of a chunk [C, V]."""
        (inputs, weight), *adapter_terms = self.terms
        output = nn.functional.linear(inputs[chunk], weight, self.bias)
        for inputs, weight in adapter_terms:
            output.add_(nn.functional.linear(inputs[chunk], weight))
        return output

    def select_tokens(self, token_ids: Tensor) -> HeadTerms:
        """Return the head of a vocabulary of these tokens."""
        bias = None if self.bias is None else self.bias.index_select(0, token_ids)
        terms = [
            HeadTerm(inputs, weight.index_select(0, token_ids)) for inputs, weight in self.terms
        ]
        return HeadTerms(terms, bias)


class Targets(NamedTuple):
    """Tokens whose log-probs are needed."""

    positions: Tensor
    """int64 [E] index of the position that precedes each token."""
    token_ids: Tensor
    """int64 [E]"""

    def locate(self, chunk: slice, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return each target's index [E] in a chunk's logits, and whether the chunk has it [E].

        The index of a target outside the chunk is valid but arbitrary. Selecting only the targets
        inside would make the CPU wait for the GPU.
        """
        is_inside = (self.positions >= chunk.start) & (self.positions < chunk.stop)
        rows = (self.positions - chunk.start).clamp(0, chunk.stop - chunk.start - 1)
        return rows * vocab_size + self.token_ids, is_inside


def compute_chunked_logprobs(
    head: HeadTerms, transform: LogitTransform, targets: Targets, entropy_mode: EntropyMode
) -> tuple[Tensor, Tensor]:
    """Return the log-probs [E] of the targets, and the entropies [P] of all positions.

    The entropies are zeros if `entropy_mode` is "none".
    """
    tensors = [tensor for term in head.terms for tensor in term]
    logprobs, entropies = _ChunkedLogprobs.apply(
        _Calculation(transform, targets, entropy_mode), head.bias, *tensors
    )
    return logprobs, entropies


class _Calculation(NamedTuple):
    transform: LogitTransform
    targets: Targets
    entropy_mode: EntropyMode


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs [E] of the targets, and entropies [P] of all positions (zeros if not needed).

    With p = softmax(z) and entropy h = -sum(p * log p), the derivatives with respect to the logits
    z are

        d(log p_t) / dz_v = (v == t) - p_v
        dh / dz_v         = -p_v * (log p_v + h)
    """

    @staticmethod
    def forward(
        ctx: Any, calculation: _Calculation, bias: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`tensors` are the inputs and the weight of each of the head's terms."""
        head = HeadTerms.from_tensors(bias, tensors)
        transform, targets, entropy_mode = calculation
        dtype = _get_sum_dtype(tensors[0])
        logprobs = tensors[0].new_zeros(len(targets.token_ids), dtype=dtype)
        entropies = tensors[0].new_zeros(len(tensors[0]), dtype=dtype)
        all_logprobs = None
        for chunk in head.list_chunks():
            all_logprobs = None  # frees the memory, which the next chunk needs
            all_logprobs = transform.apply(head.compute_output(chunk)).log_softmax(-1)
            indices, is_inside = targets.locate(chunk, head.vocab_size)
            chunk_logprobs = all_logprobs.view(-1).index_select(0, indices)
            logprobs = chunk_logprobs.where(is_inside, logprobs)
            if entropy_mode != "none":
                entropies[chunk] = -all_logprobs.exp().mul_(all_logprobs).sum(-1)
        ctx.calculation = calculation
        # The slope of a capped transform depends on the logits themselves.
        ctx.last_logprobs = all_logprobs if transform.is_linear else None
        ctx.save_for_backward(entropies, bias, *tensors)
        if entropy_mode != "gradient":
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grads: Tensor, entropy_grads: Tensor) -> tuple[Any, ...]:
        transform, targets, entropy_mode = ctx.calculation
        entropies, bias, *tensors = ctx.saved_tensors
        head = HeadTerms.from_tensors(bias, tensors)
        position_grads = torch.zeros_like(entropies)
        position_grads.index_add_(0, targets.positions, logprob_grads)
        gradients = _HeadGradients(head, ctx.needs_input_grad[1:])
        all_logprobs, ctx.last_logprobs = ctx.last_logprobs, None
        slopes: Tensor | float = transform.slope
        for chunk in reversed(head.list_chunks()):
            if all_logprobs is None:
                logits = transform.apply(head.compute_output(chunk))
                slopes = transform.compute_slopes(logits)
                all_logprobs = logits.log_softmax(-1)
                del logits
            logit_grads = all_logprobs.exp()
            if entropy_mode == "gradient":
                all_logprobs.add_(entropies[chunk, None]).mul_(entropy_grads[chunk, None])
                logit_grads.mul_(all_logprobs.add_(position_grads[chunk, None])).neg_()
            else:
                logit_grads.mul_(-position_grads[chunk, None])
            all_logprobs = None
            indices, is_inside = targets.locate(chunk, head.vocab_size)
            logit_grads.view(-1).index_add_(0, indices, logprob_grads.where(is_inside, 0.0))
            gradients.add(chunk, logit_grads.mul_(slopes))
            del logit_grads
        return None, *gradients.list_all()


class _HeadGradients:
    """Gradients of a head's tensors. Sums over several chunks are at least float32."""

    def __init__(self, head: HeadTerms, is_needed: Sequence[bool]) -> None:
        """`is_needed` has an entry for the bias, then two for each term."""
        self._head = head
        self._is_needed = is_needed
        self._bias: Tensor | None = None
        self._inputs = [torch.empty_like(term.inputs) for term in head.terms]
        self._weights: list[Tensor | None] = [None] * len(head.terms)

    def add(self, chunk: slice, output_grads: Tensor) -> None:
        """Add the gradients of a chunk, from the gradients of the head's output [C, V]."""
        if self._is_needed[0]:
            bias_grads = output_grads.sum(0)
            self._bias = bias_grads if self._bias is None else self._bias.add_(bias_grads)
        for index, (inputs, weight) in enumerate(self._head.terms):
            needs_inputs, needs_weight = self._is_needed[1 + 2 * index : 3 + 2 * index]
            term_grads = output_grads.to(weight.dtype)
            if needs_inputs:
                torch.mm(term_grads, weight, out=self._inputs[index][chunk])
            if needs_weight:
                total = self._weights[index]
                self._weights[index] = _add_product(total, term_grads.T, inputs[chunk])

    def list_all(self) -> list[Tensor | None]:
        """Return each gradient in the type of its tensor; unneeded gradients are arbitrary."""
        weights = [
            None if total is None else total.to(term.weight.dtype)
            for term, total in zip(self._head.terms, self._weights, strict=True)
        ]
        bias = None if self._bias is None else self._bias.to(self._head.terms[0].weight.dtype)
        pairs = zip(self._inputs, weights, strict=True)
        return [bias, *(gradient for pair in pairs for gradient in pair)]


def _add_product(total: Tensor | None, matrix: Tensor, factor: Tensor) -> Tensor:
    """Return total + matrix @ factor; may overwrite `total`.

    The first product keeps its type, and every sum is at least float32.
    """
    if total is None:
        return matrix @ factor
    total = total.to(_get_sum_dtype(total))
    return (
        total.addmm_(matrix, factor) if total.dtype == matrix.dtype else total.add_(matrix @ factor)
    )


def _get_sum_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for a float64 tensor, float32 for all others."""
    return torch.promote_types(tensor.dtype, torch.float32)
