"""Check at the start that the models of the learner support packed prefix trees.

Packed trees need a custom attention mask and custom positions. Most causal models support both. A
model with a sliding window, or with recurrent layers (state spaces, linear attention), does not: it
would train on wrong outputs without an error.

    model's class and configuration --> test model: two narrow layers, float32, CPU
                                           |  sequences in separate rows, and packed as a tree
                                           v
                                        log-probs agree up to rounding

Support is a property of the class, not of the weights. The test model is therefore judged in
float32, where rounding cannot hide a fault. In bfloat16, the log-probs of a correct model of normal
size may differ by 0.3 nats, and those of a model that ignores positions by less.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ludus.trainer.core.streams import Stream, make_random, use_torch_stream
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.micro_batches import (
    MicroBatchConfig,
    make_micro_batches,
    make_unscored_sample,
)
from ludus.trainer.learner.model import PolicyModel
from ludus.trainer.learner.packing import RowCosts
from ludus.trainer.learner.rounding import change_rounding

_log = logging.getLogger(__name__)

_FULL_ATTENTION_LAYERS = {"full_attention", "attention", "global"}
_NUM_LAYERS = 2
_VOCAB_SIZE = 256
_FEED_FORWARD_FIELDS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_FEED_FORWARD_WIDTH = 64
_PREFIX_LENGTH, _BRANCH_LENGTH = 12, 6
_MAX_TOKENS = 1024
"""Maximum number of tokens of a micro-batch; all test sequences fit in a single micro-batch."""
_SINGLE_ROW_COSTS = RowCosts(per_token=1.0, per_pair=0.0)
_MAX_NOISE_RATIO = 10.0
"""Maximum ratio of the difference that packing causes in log-probs to the difference that rounding
causes. Measured on 14 architectures: at most 0.5 for correct models, and at least 181 for models
that ignore the mask or the positions."""
_MIN_NOISE = 1e-7
"""Smallest assumed rounding of log-probs in float32, in nats."""


def can_pack_trees(models: Sequence[PreTrainedModel], device: torch.device) -> bool:
    """Return whether all models support trees; log a warning with the reason if not.

    A collective: all ranks return the same answer.

    Args:
        models: the policy's language model and, if it is separate, the critic's model.
        device: device of the collective.
    """
    policy, fault = models[0], _find_packing_fault(models[0])
    if fault:
        _log.warning(
            "learner.packing = 'tree' does not support %s (%s); padding sequences instead",
            *(type(policy).__name__, fault),
        )
    is_supported = not fault and all(_has_same_attention(policy, model) for model in models)
    agreed_flag = torch.tensor(int(is_supported), device=device)
    dist.all_reduce(agreed_flag, dist.ReduceOp.MIN)
    return bool(agreed_flag)


def _find_packing_fault(language_model: PreTrainedModel) -> str:
    """Return why the model does not support trees; empty if it does."""
    config = language_model.config
    layer_kinds = set(getattr(config, "layer_types", None) or ())
    sliding_window = None if layer_kinds else getattr(config, "sliding_window", None)
    if sliding_window is not None or not layer_kinds <= _FULL_ATTENTION_LAYERS:
        return f"layers {sorted(layer_kinds) or 'of one kind'}, sliding window {sliding_window}"
    try:
        separate_logprobs, packed_logprobs, changed_logprobs = _run_test_model(language_model)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"the model fails with packed sequences: {error}"
    difference = _compute_mean_difference(separate_logprobs, packed_logprobs)
    noise = max(_compute_mean_difference(separate_logprobs, changed_logprobs), _MIN_NOISE)
    if difference <= _MAX_NOISE_RATIO * noise:  # False for NaN
        return ""
    return f"log-probs of packed sequences differ by {difference:.3g}, rounding by {noise:.3g}"


@torch.no_grad()
def _run_test_model(language_model: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of test sequences: in separate rows, packed, and rounded differently."""
    with use_torch_stream(0, Stream.LEARNER):
        policy = PolicyModel(type(language_model)(_shrink(language_model.config)).float()).eval()
    separate_logprobs, packed_logprobs = _compute_logprobs(policy)
    with change_rounding(policy.language_model):
        changed_logprobs, _ = _compute_logprobs(policy)
    return separate_logprobs, packed_logprobs, changed_logprobs


def _shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration with few narrow layers and a small vocabulary."""
    config = copy.deepcopy(config)
    num_layers = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(config, name, value[:_NUM_LAYERS])
    config.num_hidden_layers = min(num_layers, _NUM_LAYERS)
    for name in _FEED_FORWARD_FIELDS:
        if isinstance(width := getattr(config, name, None), int):
            setattr(config, name, min(width, _FEED_FORWARD_WIDTH))
    config.vocab_size = min(config.vocab_size, _VOCAB_SIZE)
    config.pad_token_id = None  # it may be outside the small vocabulary
    return config


def _compute_logprobs(policy: PolicyModel) -> tuple[Tensor, Tensor]:
    """Return the log-probs of test sequences in separate rows, and packed as a tree."""
    sequences = _make_sequences(policy.language_model.config.vocab_size)
    samples = [make_unscored_sample(ids, [False] + [True] * (len(ids) - 1)) for ids in sequences]
    batch, logprobs = collate(samples), []
    for packs_trees in (False, True):
        settings = MicroBatchConfig(_MAX_TOKENS, _SINGLE_ROW_COSTS, packs_trees=packs_trees)
        [micro_batch] = make_micro_batches(batch, np.arange(batch.num_samples), settings)
        output = policy(micro_batch.rows, temperature=1.0)
        logprobs.append(micro_batch.gather_samples(output.logprobs)[micro_batch.mask])
    return logprobs[0], logprobs[1]


def _make_sequences(vocab_size: int) -> list[list[int]]:
    """Return token ids of six sequences: a common prefix, and two branches with three leaves."""
    generator = make_random(0, Stream.LEARNER)

    def draw(length: int) -> list[int]:
        return [generator.randrange(vocab_size) for _ in range(length)]

    prefix, branches = draw(_PREFIX_LENGTH), [draw(_BRANCH_LENGTH) for _ in range(2)]
    return [
        list(chain(prefix, branch, draw(_BRANCH_LENGTH + length)))
        for branch in branches
        for length in range(3)
    ]


def _compute_mean_difference(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().mean())


def _has_same_attention(policy: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Return whether a model has the same kind of attention as the policy; log a warning if not.

    With the same kind of attention, the model supports packed sequences if the policy does.
    """
    differences = [
        field
        for field in ("model_type", "sliding_window")
        if getattr(policy.config, field, None) != getattr(model.config, field, None)
    ]
    # The number of layers may differ, but not their kinds.
    layer_kinds = set(getattr(model.config, "layer_types", None) or ())
    if not layer_kinds <= set(getattr(policy.config, "layer_types", None) or ()):
        differences.append("layer_types")
    if differences:
        _log.warning(
            "learner.packing = 'tree' was tested with %s, and %s has a different %s; padding "
            "sequences instead",
            *(type(policy).__name__, type(model).__name__, ", ".join(differences)),
        )
    return not differences
