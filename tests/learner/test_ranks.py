"""Two ranks take the step that one rank takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ludus.trainer.types import Coefficients
from tests.learner.tiny_policy import make_batch, make_learner, make_policy_folder

NUM_STEPS = 2


@dataclass(frozen=True)
class Outcome:
    """What one run of NUM_STEPS steps came to."""

    losses: list[float]
    grad_norms: list[float]
    weights: torch.Tensor


def train_rank(rank: int, num_ranks: int, folder: str) -> None:
    """Runs one rank; rank 0 saves the outcome."""
    torch.set_num_threads(1)
    meeting_place = f"file://{folder}/store-{num_ranks}"
    dist.init_process_group("gloo", init_method=meeting_place, rank=rank, world_size=num_ranks)
    learner = make_learner(f"{folder}/model", num_minibatches=2, max_tokens_per_micro_batch=64)
    metrics = [
        learner.train_step(make_batch(seed=step), Coefficients(1e-3, entropy=0.1, kl=0.0))
        for step in range(NUM_STEPS)
    ]
    state = learner.full_state()
    if rank == 0:
        outcome = Outcome(
            [m.loss for m in metrics],
            [m.grad_norm for m in metrics],
            torch.cat([tensor.flatten() for tensor in state.values()]),
        )
        torch.save(outcome, f"{folder}/outcome-{num_ranks}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_loss_gradient_and_weights_agree_between_one_and_two_ranks(tmp_path: Path) -> None:
    make_policy_folder(tmp_path / "model")
    for num_ranks in (1, 2):
        mp.spawn(train_rank, args=(num_ranks, str(tmp_path)), nprocs=num_ranks)
    one, two = (
        torch.load(tmp_path / f"outcome-{num_ranks}.pt", weights_only=False) for num_ranks in (1, 2)
    )
    assert one.losses == pytest.approx(two.losses, abs=1e-5)
    assert one.grad_norms == pytest.approx(two.grad_norms, abs=1e-5)
    # AdamW turns the rounding of a gradient near zero into a step of full size, so a few
    # weights may differ; the rest agree.
    agree = (one.weights - two.weights).abs() < 1e-5
    assert agree.float().mean() > 0.99
