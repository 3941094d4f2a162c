"""Log-probs and entropies of sampled tokens, computed with as little memory as possible.

    chunked     many logits, if the head is linear and its output changes in a known way:
                `chunked_logprobs`
    restricted  tokens sampled from few allowed tokens: only their rows of the head's weight
    plain       few logits, and all other models: all logits [P, V], as the model returns them

Shapes: P = positions, R = rows, L = length of the longest row, H = width, V = vocabulary, E =
targets, K = largest number of allowed tokens, U = tokens that at least one target allows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from ludus.trainer.algorithms.losses import entropy
from ludus.trainer.learner.chunked_logprobs import (
    EntropyMode,
    HeadTerm,
    HeadTerms,
    LogitTransform,
    Targets,
    compute_chunked_logprobs,
)
from ludus.trainer.learner.micro_batches import PackedRows

_log = logging.getLogger(__name__)

MAX_PLAIN_LOGITS = 2**20
"""Maximum number of logits for the plain computation, which is faster up to about this size."""
_PROBE_EXPONENTS = (-9, 5)
"""Powers of ten of the smallest and the largest number of a probe."""
_PROBE_TOLERANCE = 1e-6
"""Maximum relative difference between a model's logits and those of a fitted transform."""


class TokenOutput(NamedTuple):
    """Outputs for the targets of rows, in float32 or float64."""

    logprobs: Tensor
    """[E]"""
    entropies: Tensor | None
    """[E] of the distribution that each token was sampled from."""


class LanguageHead:
    """The last layer of a language model, and the transform from the layer's output to the logits.

    The first call runs the model in an additional pass to test whether chunks are possible. The
    result is the same on all ranks, because it does not depend on their rows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._vocab_size = 0
        self._transform: LogitTransform | None = None

    def compute_output(
        self,
        rows: PackedRows,
        model_inputs: Mapping[str, Any],
        temperature: float,
        entropy_mode: EntropyMode,
    ) -> tuple[TokenOutput, Tensor]:
        """Run the model; return the outputs for its targets, and all hidden states [R * L, H]."""
        layer = self._model.get_output_embeddings()
        if self._vocab_size == 0:
            self._probe(layer, rows.positions[:1], model_inputs)
        num_logits = len(rows.positions) * self._vocab_size
        if self._transform is None or num_logits <= MAX_PLAIN_LOGITS:
            hidden_states, logits = self._run_model(layer, rows.positions, model_inputs)
            return compute_plain_output(logits, rows, temperature, entropy_mode), hidden_states
        # The model needs a position for its own logits, which are not used.
        hidden_states, _ = self._run_model(layer, rows.positions[:1], model_inputs)
        terms = split_head(layer, hidden_states.index_select(0, rows.positions))
        assert terms is not None
        transform = self._transform._replace(temperature=temperature)
        return compute_token_output(terms, rows, transform, entropy_mode), hidden_states

    @torch.no_grad()
    def _probe(self, layer: nn.Module, positions: Tensor, model_inputs: Mapping[str, Any]) -> None:
        """Find the size of the vocabulary, and the transform from the head's output to logits."""
        handle = layer.register_forward_hook(lambda *args: _make_probe(args[-1]))
        try:
            hidden_states, logits = self._run_model(layer, positions, model_inputs)
        finally:
            handle.remove()
        self._vocab_size = logits.shape[-1]
        if split_head(layer, hidden_states) is None:
            reason = f"chunks are not possible with a head of type {type(layer).__name__}"
        else:
            self._transform = _fit_transform(_make_probe(logits)[0], logits.double())
            reason = "it changes the output of its head in an unknown way"
        if self._transform is None:
            _log.warning(
                "%s computes the logits of all positions of a micro-batch at once, because %s; "
                "lower learner.max_tokens_per_micro_batch if memory runs out",
                *(type(self._model).__name__, reason),
            )

    def _run_model(
        self, layer: nn.Module, positions: Tensor, model_inputs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return all inputs of the head [R * L, H], and the logits of `positions` [P, V]."""
        hidden_states: list[Tensor] = []

        def select_positions(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            hidden_states.append(args[0].flatten(0, 1))
            return (hidden_states[0].index_select(0, positions)[None],)

        handle = layer.register_forward_pre_hook(select_positions)
        try:
            logits = self._model(**model_inputs, use_cache=False).logits[0]
        finally:
            handle.remove()
        return hidden_states[0], logits


def _make_probe(output: Tensor) -> Tensor:
    """Return float64 numbers of all magnitudes and both signs, shaped like a head's output."""
    vocab_size = output.shape[-1]
    numbers = torch.logspace(
        *_PROBE_EXPONENTS, vocab_size, dtype=torch.float64, device=output.device
    )
    numbers[1::2] *= -1
    return numbers[None, None]


def _fit_transform(outputs: Tensor, logits: Tensor) -> LogitTransform | None:
    """Return the transform that maps the probe's outputs to these logits; None if there is none."""
    if outputs.shape != logits.shape:
        return None
    scale = float(logits[0, 0] / outputs[0, 0])
    scale = 1.0 if math.isclose(scale, 1, rel_tol=_PROBE_TOLERANCE) else scale
    for cap in (math.inf, float(logits.abs().max())):
        transform = LogitTransform(scale, cap)
        expected_logits = transform.apply(outputs)
        if torch.allclose(logits, expected_logits, rtol=_PROBE_TOLERANCE, atol=0):
            return transform
    return None


def split_head(head: nn.Module, hidden_states: Tensor) -> HeadTerms | None:
    """Return the linear terms of a head for its inputs [P, H]; None if its kind is unknown."""
    if type(head) is nn.Linear:
        return HeadTerms([HeadTerm(hidden_states, head.weight)], head.bias)
    if type(head) is not LoraLinear or type(head.base_layer) is not nn.Linear or head.merged:
        return None
    terms = [HeadTerm(hidden_states, head.base_layer.weight)]
    for name in [] if head.disable_adapters else head.active_adapters:
        if name in head.lora_variant or head.lora_bias[name]:
            return None
        inputs = head.lora_A[name](head.lora_dropout[name](hidden_states)) * head.scaling[name]
        terms.append(HeadTerm(inputs, head.lora_B[name].get_parameter("weight")))
    return HeadTerms(terms, head.base_layer.bias)


def compute_token_output(
    head: HeadTerms, rows: PackedRows, transform: LogitTransform, entropy_mode: EntropyMode
) -> TokenOutput:
    """Return the outputs for the targets of rows; `head` has the inputs at the rows' positions."""
    if rows.allowed_ids is not None:
        token_ids, columns = rows.allowed_ids.unique(return_inverse=True)
        # The padding of allowed_ids is -1. Its logits are not used.
        head = head.select_tokens(token_ids.clamp(min=0))
        logits = transform.apply(head.compute_output(slice(None)))
        return _compute_restricted(logits, columns, rows, entropy_mode)
    targets = Targets(rows.position_of_target, rows.target_ids)
    logprobs, entropies = compute_chunked_logprobs(head, transform, targets, entropy_mode)
    if entropy_mode == "none":
        return TokenOutput(logprobs, None)
    return TokenOutput(logprobs, entropies.index_select(0, rows.position_of_target))


def compute_plain_output(
    output: Tensor, rows: PackedRows, temperature: float, entropy_mode: EntropyMode
) -> TokenOutput:
    """Return the same as `compute_token_output`, from the model's output [P, V]."""
    logits = LogitTransform(temperature=temperature).apply(output)
    if rows.allowed_ids is not None:
        return _compute_restricted(logits, rows.allowed_ids.clamp(min=0), rows, entropy_mode)
    all_logprobs = logits.log_softmax(-1)
    # A one-dimensional index: the gradient of a two-dimensional index is several times slower.
    indices = rows.position_of_target * all_logprobs.shape[1] + rows.target_ids
    logprobs = all_logprobs.flatten().index_select(0, indices)
    if entropy_mode == "none":
        return TokenOutput(logprobs, None)
    entropies = entropy(all_logprobs if entropy_mode == "gradient" else all_logprobs.detach())
    return TokenOutput(logprobs, entropies.index_select(0, rows.position_of_target))


def _compute_restricted(
    logits: Tensor, columns: Tensor, rows: PackedRows, entropy_mode: EntropyMode
) -> TokenOutput:
    """Return the outputs for distributions over each target's allowed tokens.

    A target that was the only allowed token has the log-prob 0 and no gradient.

    Args:
        logits: [P, U] of the allowed tokens, or [P, V] of all tokens.
        columns: int64 [E, K] column of each allowed token in `logits`.
    """
    allowed_ids = rows.allowed_ids
    assert allowed_ids is not None
    indices = rows.position_of_target[:, None] * logits.shape[1] + columns
    allowed_logits = logits.flatten().index_select(0, indices.flatten()).view_as(indices)
    all_logprobs = allowed_logits.masked_fill(allowed_ids < 0, -torch.inf).log_softmax(-1)
    target_columns = (allowed_ids == rows.target_ids[:, None]).int().argmax(-1, keepdim=True)
    logprobs = all_logprobs.gather(1, target_columns)[:, 0]
    if entropy_mode == "none":
        return TokenOutput(logprobs, None)
    # Padding with 0 adds nothing to the entropy, like -inf, but its gradient is finite.
    entropy_logprobs = all_logprobs.masked_fill(allowed_ids < 0, 0.0)
    if entropy_mode == "value":
        entropy_logprobs = entropy_logprobs.detach()
    return TokenOutput(logprobs, entropy(entropy_logprobs))
