"""Where a training stands: what a checkpoint holds beside weights and optimizer."""

from __future__ import annotations

from pydantic import BaseModel

from ludus.proto.reward_models import RewardModelEpoch


class Position(BaseModel):
    """Counters of a training, and the epochs behind it."""

    epoch: int = 0
    """Epochs done."""
    batch: int = 0
    """Batches done in the one under way."""
    step: int = 0
    """Optimizer steps done, skipped ones included."""
    loss_sum: float = 0.0
    """Over the comparisons of the epoch under way."""
    num_right: int = 0
    """Comparisons of the epoch under way in which the preferred answer had the highest score."""
    recent_loss: float | None = None
    num_skipped: int = 0
    """Steps whose gradient was not finite."""
    num_skipped_in_a_row: int = 0
    epochs: list[RewardModelEpoch] = []
    kept_epoch: int = 0
    """The epoch, from 1, whose weights are the best so far."""
    elapsed_s: float = 0.0

    def end_epoch(self, finished: RewardModelEpoch, is_kept: bool) -> None:
        """Begin the next epoch."""
        self.epochs.append(finished)
        self.epoch += 1
        self.batch, self.loss_sum, self.num_right = 0, 0.0, 0
        if is_kept:
            self.kept_epoch = self.epoch
