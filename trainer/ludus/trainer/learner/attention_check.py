"""Whether a model reads a row of prefix trees as it reads each sequence alone.

Trees need an attention mask and positions of their own. Most causal models take both; one with
a sliding window, or with layers that run along the row (state spaces, linear attention), does
not, and would train on nonsense without a word. So the model is asked, once, at the start.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ludus.trainer.core.types import Batch, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.micro_batches import (
    MicroBatchConfig,
    make_micro_batches,
    unscored_sample,
)
from ludus.trainer.learner.model import Policy
from ludus.trainer.learner.packing import RowCosts

_log = logging.getLogger(__name__)

_SEQUENCES = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 5, 8], [1, 2, 9, 4], [7, 2, 3, 1])
"""Small token ids, which every vocabulary has."""
_ONE_ROW = RowCosts(per_token=1.0, per_pair=0.0)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of a log-prob that is only rounding, by compute type."""
_LOOKS_BACK_TO_THE_START = {"full_attention", "attention", "global"}


@torch.no_grad()
def can_pack_trees(policy: Policy, dtype: torch.dtype, device: torch.device) -> bool:
    """True when trees give the model's own answers; else a warning names the reason.

    A collective where the policy is sharded.
    """
    config = policy.language_model.config
    layers = set(getattr(config, "layer_types", None) or ())
    window = None if layers else getattr(config, "sliding_window", None)
    if window is not None or not layers <= _LOOKS_BACK_TO_THE_START:
        _log.warning(
            "learner.packing = 'tree' does not fit %s: layers %s, sliding window %s; sequences "
            "are padded instead",
            type(policy.language_model).__name__,
            sorted(layers) or "of one kind",
            window,
        )
        return False
    batch = collate([_sample(token_ids) for token_ids in _SEQUENCES])
    policy.eval()
    alone, packed = (_answers(policy, batch, costs, device) for costs in (None, _ONE_ROW))
    error = (alone - packed).abs().max().item()
    if error <= _TOLERANCE[dtype]:
        return True
    _log.warning(
        "learner.packing = 'tree' does not fit %s: its log-probs of packed sequences are off by "
        "%.3g; sequences are padded instead",
        type(policy.language_model).__name__,
        error,
    )
    return False


def reads_alike(policy: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether another model reads packed sequences where the policy does, being of its family.

    A warning says so where that is not known.
    """
    mine, theirs = policy.config, other.config
    parts = ("model_type", "layer_types", "sliding_window")
    differing = [part for part in parts if getattr(mine, part, None) != getattr(theirs, part, None)]
    # As many layers as it likes, as long as they are of the same kinds.
    if differing == ["layer_types"] and set(mine.layer_types) >= set(theirs.layer_types):
        return True
    if differing:
        _log.warning(
            "learner.packing = 'tree' is checked for %s, and %s differs in %s; sequences are "
            "padded instead",
            *(type(policy).__name__, type(other).__name__, ", ".join(differing)),
        )
    return not differing


def _answers(policy: Policy, batch: Batch, costs: RowCosts | None, device: torch.device) -> Tensor:
    """The log-probs of all sampled tokens, in an order that does not depend on the packing."""
    answers: dict[float, list[float]] = {}
    config = MicroBatchConfig(1024, costs)
    for micro_batch in make_micro_batches(batch, np.arange(batch.num_samples), config):
        moved = micro_batch.to(device)
        logprobs = moved.of_samples(policy(moved.rows, temperature=1.0).logprobs)
        for number, row, mask in zip(moved.rewards[:, 0], logprobs, moved.mask, strict=True):
            answers[float(number)] = row[mask].tolist()
    return torch.tensor([value for number in sorted(answers) for value in answers[number]])


def _sample(token_ids: list[int]) -> TrainingSample:
    """All but the first token sampled; the first reward tells the samples apart."""
    mask = [index > 0 for index in range(len(token_ids))]
    number = float(_SEQUENCES.index(token_ids))
    rewards = [number * (index == 1) for index in range(len(token_ids))]
    return replace(unscored_sample(token_ids, mask), rewards=rewards)
