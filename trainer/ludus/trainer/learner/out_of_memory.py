"""Recovery of a learner that ran out of memory in a training step.

    a rank       raises LearnerMemoryError, with a smaller limit for micro-batches
    other ranks  may wait for it in a collective, forever
        |
    driver       copies each rank's state from before the step, in another thread than the step
                 replaces all processes, which frees all memory
                 restores the copies, and trains the same batch in smaller micro-batches

The ranks cannot agree among themselves: a rank that fails inside a layer leaves the others in a
collective of that layer, and no collective can follow.
"""

from __future__ import annotations

import math

import torch

from ludus.proto.config import LearnerConfig
from ludus.proto.errors import ConfigError, LearnerMemoryError
from ludus.trainer.core.types import Batch

_MEMORY_MESSAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Parts of the error messages of libraries under torch when a GPU has no memory left."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an operation failed because a GPU has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(message in str(error) for message in _MEMORY_MESSAGES)


def make_memory_error(
    rank: int, batch: Batch, config: LearnerConfig, error: RuntimeError
) -> LearnerMemoryError | ConfigError:
    """Return the error of a rank that ran out of memory in a step on a batch.

    Returns:
        a LearnerMemoryError with half the tokens per micro-batch; a ConfigError if the limit
        cannot be lower, because the longest sequence must fit in a micro-batch.
    """
    reason = str(error).partition("\n")[0]
    lengths = batch.sequences.lengths
    longest = int(lengths.max())
    num_parts = config.num_minibatches * config.num_ranks
    # A limit above a rank's share of a minibatch has no effect, and half of it may have none.
    limit = min(config.known_max_tokens_per_micro_batch, math.ceil(int(lengths.sum()) / num_parts))
    if limit > longest:
        return LearnerMemoryError(
            f"learner rank {rank} ran out of memory: {reason}", max(limit // 2, longest)
        )
    has_checkpointing = config.activation_checkpointing
    first_remedy = "" if has_checkpointing else "set learner.activation_checkpointing = true, "
    return ConfigError(
        f"learner rank {rank} ran out of memory, although a micro-batch has at most the {longest} "
        f"tokens of the longest sequence: {reason}; {first_remedy}lower rollout.max_tokens, raise "
        "learner.num_ranks, or give each rank more of a GPU"
    )
