"""The position of a training: the part of a checkpoint that is not tensors."""

from __future__ import annotations

from pydantic import BaseModel

from ludus.proto.reward_models import RewardModelEpoch


class Position(BaseModel):
    """Counters of a training, and its finished epochs."""

    epoch: int = 0
    """Number of finished epochs."""
    batch: int = 0
    """Number of finished batches of the current epoch."""
    step: int = 0
    """Number of optimizer steps, including skipped steps."""
    loss_sum: float = 0.0
    """Sum of the losses of the current epoch's comparisons."""
    num_right: int = 0
    """Number of the current epoch's comparisons in which the preferred answer had the highest
    score."""
    recent_loss: float | None = None
    num_skipped: int = 0
    """Number of steps that were skipped because their gradient was not finite."""
    num_skipped_in_a_row: int = 0
    epochs: list[RewardModelEpoch] = []
    kept_epoch: int = 0
    """Number of the epoch, from 1, whose weights are the best so far."""
    elapsed_s: float = 0.0

    def end_epoch(self, epoch: RewardModelEpoch, *, is_kept: bool) -> None:
        """Record a finished epoch and start the next one."""
        self.epochs.append(epoch)
        self.epoch += 1
        self.batch, self.loss_sum, self.num_right = 0, 0.0, 0
        if is_kept:
            self.kept_epoch = self.epoch
