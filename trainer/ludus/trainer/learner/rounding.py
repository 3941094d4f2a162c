"""A model's own rounding error, as a difference of log-probs.

Two correct implementations of a model round differently, and the difference grows with the depth
of the model. A change of the embeddings in the last bits changes the rounding of all layers, so the
effect of the change has the size of such differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

_RELATIVE_CHANGE = 2.0**-22
"""Relative change of the embeddings; float32 rounds to 2**-24."""


@contextmanager
def change_rounding(model: PreTrainedModel) -> Iterator[None]:
    """Change the embeddings in the last bit within the block, so that all layers round differently.

    Half of the values become larger, because a norm would remove a change that all values share.
    """

    def change(module: torch.nn.Module, arguments: object, embeddings: Tensor) -> Tensor:
        factors = torch.full_like(embeddings, 1 - _RELATIVE_CHANGE)
        factors[..., ::2] = 1 + _RELATIVE_CHANGE
        return embeddings * factors

    handle = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


def compute_max_difference(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> float:
    """Return the largest absolute difference of two lists of rows; NaN if a value is not finite."""
    pair = [np.array([*chain.from_iterable(rows)]) for rows in (first, second)]
    return float(np.abs(pair[0] - pair[1]).max(initial=0.0))
