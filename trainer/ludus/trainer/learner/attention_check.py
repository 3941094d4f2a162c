"""Check that a model gives the same log-probs for packed prefix trees as for single sequences.

Trees need a custom attention mask and custom positions. Most causal models support both. A model
with a sliding window, or with layers that run along the row (state spaces, linear attention), does
not: it would train on wrong outputs without an error. So the model is tested once, at the start.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from transformers import PreTrainedModel

from ludus.trainer.data.batch import collate
from ludus.trainer.learner.micro_batches import (
    MicroBatchConfig,
    make_micro_batches,
    unscored_sample,
)
from ludus.trainer.learner.model import PolicyModel
from ludus.trainer.learner.packing import RowCosts

_log = logging.getLogger(__name__)

_SEQUENCES = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 5, 8], [1, 2, 9, 4], [7, 2, 3, 1])
"""Sequences of small token ids, which every vocabulary has."""
_MAX_TOKENS = 1024
"""Maximum number of tokens of a micro-batch; all sequences fit in a single micro-batch."""
_SINGLE_ROW_COSTS = RowCosts(per_token=1.0, per_pair=0.0)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Maximum difference of log-probs that counts as rounding, by compute type."""
_FULL_ATTENTION_LAYERS = {"full_attention", "attention", "global"}


@torch.no_grad()
def can_pack_trees(policy: PolicyModel, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the model supports trees; log a warning with the reason if not.

    A collective if the policy is sharded.
    """
    config = policy.language_model.config
    layers = set(getattr(config, "layer_types", None) or ())
    window = None if layers else getattr(config, "sliding_window", None)
    if window is not None or not layers <= _FULL_ATTENTION_LAYERS:
        _log.warning(
            "learner.packing = 'tree' does not support %s (layers %s, sliding window %s); "
            "padding sequences instead",
            type(policy.language_model).__name__,
            sorted(layers) or "of one kind",
            window,
        )
        return False
    batch = collate([unscored_sample(ids, [False] + [True] * (len(ids) - 1)) for ids in _SEQUENCES])
    policy.eval()
    logprobs = []
    for costs in (None, _SINGLE_ROW_COSTS):
        config = MicroBatchConfig(_MAX_TOKENS, costs)
        [micro_batch] = make_micro_batches(batch, np.arange(batch.num_samples), config)
        micro_batch = micro_batch.to(device)
        output = policy(micro_batch.rows, temperature=1.0)
        logprobs.append(micro_batch.gather_samples(output.logprobs)[micro_batch.mask])
    error = (logprobs[0] - logprobs[1]).abs().max().item()
    if error <= _TOLERANCE[dtype]:
        return True
    _log.warning(
        "learner.packing = 'tree' does not support %s (log-probs of packed sequences differ by "
        "%.3g); padding sequences instead",
        type(policy.language_model).__name__,
        error,
    )
    return False


def has_same_attention(policy: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Return whether a model's attention is of the same kind as the policy's.

    If so, the model supports packed sequences when the policy does. If not, log a warning.
    """
    differences = [
        field
        for field in ("model_type", "sliding_window")
        if getattr(policy.config, field, None) != getattr(model.config, field, None)
    ]
    # The number of layers may differ, but not their kinds.
    policy_layers, layers = (
        set(getattr(config, "layer_types", None) or ()) for config in (policy.config, model.config)
    )
    if not layers <= policy_layers:
        differences.append("layer_types")
    if differences:
        _log.warning(
            "learner.packing = 'tree' was tested with %s, and %s has a different %s; padding "
            "sequences instead",
            *(type(policy).__name__, type(model).__name__, ", ".join(differences)),
        )
    return not differences
