"""An update whose gradient is not finite is skipped, on all ranks or on none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ludus.trainer.core.ragged import RaggedArray
from ludus.trainer.core.types import Batch, Coefficients
from ludus.trainer.learner.learner import Learner
from ludus.trainer.learner.model import gather_parameters
from ludus.trainer.learner.process_group import leave_process_group
from ludus.trainer.learner.step_metrics import StepMetrics
from tests.learner.tiny_policy import make_batch, make_learner, make_policy_folder

PLAIN = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.0)


def make_infinite(batch: Batch) -> Batch:
    """Return the batch with one infinite advantage."""
    advantages = [row.copy() for row in batch.advantages]
    advantages[0][np.flatnonzero(advantages[0])[0]] = np.inf
    return replace(batch, advantages=RaggedArray.from_rows(advantages, np.float32))


def weight_vector(learner: Learner) -> torch.Tensor:
    """Return all weights as one vector; a collective."""
    state = gather_parameters(learner.model.named_parameters())
    return torch.cat([tensor.flatten() for tensor in state.values()]).detach()


def test_update_with_an_infinite_gradient_is_skipped_and_counted(model_path: str) -> None:
    learner = make_learner(model_path)
    start = weight_vector(learner)
    first = learner.train_step(make_infinite(make_batch()), PLAIN)
    second = learner.train_step(make_infinite(make_batch()), PLAIN)
    assert torch.equal(weight_vector(learner), start)
    assert first.grad_norm is None
    assert (first.num_skipped_updates, first.num_skipped_in_a_row) == (1, 1)
    assert (second.num_skipped_updates, second.num_skipped_in_a_row) == (1, 2)


def test_skipped_update_does_not_affect_later_updates(model_path: str) -> None:
    plain, after_skip = make_learner(model_path), make_learner(model_path)
    after_skip.train_step(make_infinite(make_batch(seed=1)), PLAIN)
    first, second = (learner.train_step(make_batch(), PLAIN) for learner in (plain, after_skip))
    assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert second.num_skipped_in_a_row == 0
    assert torch.equal(weight_vector(plain), weight_vector(after_skip))


def test_only_the_minibatch_with_an_infinite_gradient_is_skipped(model_path: str) -> None:
    learner = make_learner(model_path, num_minibatches=4)
    start = weight_vector(learner)
    metrics = learner.train_step(make_infinite(make_batch()), PLAIN)
    assert metrics.num_skipped_updates == 1
    assert metrics.grad_norm is not None and np.isfinite(metrics.grad_norm)
    end = weight_vector(learner)
    assert torch.isfinite(end).all()
    assert not torch.equal(end, start)


def test_all_ranks_skip_an_update_that_fails_on_one_rank(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(model_path)
    start = weight_vector(learner)
    reduce = dist.all_reduce

    def reduce_with_a_failed_rank(tensor: torch.Tensor, op: object = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.MIN:
            tensor.zero_()
        else:
            reduce(tensor)

    monkeypatch.setattr(dist, "all_reduce", reduce_with_a_failed_rank)
    assert learner.train_step(make_batch(), PLAIN).num_skipped_updates == 1
    assert torch.equal(weight_vector(learner), start)


def train_rank(rank: int, folder: str) -> None:
    """Take an infinite and a finite step as one of two ranks, and save the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    learner = make_learner(f"{folder}/model", max_tokens_per_micro_batch=64)
    metrics = [learner.train_step(b, PLAIN) for b in (make_infinite(make_batch()), make_batch())]
    torch.save((metrics, weight_vector(learner)), f"{folder}/rank-{rank}.pt")
    del learner
    leave_process_group()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_skip_the_same_updates(tmp_path: Path) -> None:
    make_policy_folder(tmp_path / "model")
    mp.spawn(train_rank, args=(str(tmp_path),), nprocs=2)
    outcomes: list[tuple[list[StepMetrics], torch.Tensor]] = [
        torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2)
    ]
    for metrics, weights in outcomes:
        assert [m.num_skipped_updates for m in metrics] == [1, 0]
        assert torch.isfinite(weights).all()
    assert torch.equal(outcomes[0][1], outcomes[1][1])
