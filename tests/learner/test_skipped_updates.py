"""Updates that all ranks skip because the gradient is not finite."""

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

NO_PENALTY = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.0)


def add_infinite_advantage(batch: Batch) -> Batch:
    """Return a copy of the batch with one infinite advantage."""
    advantages = [row.copy() for row in batch.advantages]
    advantages[0][np.flatnonzero(advantages[0])[0]] = np.inf
    return replace(batch, advantages=RaggedArray.from_rows(advantages, np.float32))


def flatten_weights(learner: Learner) -> torch.Tensor:
    """Return all weights as one vector; all ranks must call this function together."""
    weights = gather_parameters(learner.model.named_parameters())
    return torch.cat([tensor.flatten() for tensor in weights.values()]).detach()


@pytest.mark.slow
def test_update_with_an_infinite_gradient_is_skipped_and_counted(model_path: str) -> None:
    learner = make_learner(model_path)
    start_weights = flatten_weights(learner)
    first_metrics = learner.train_step(add_infinite_advantage(make_batch()), NO_PENALTY)
    second_metrics = learner.train_step(add_infinite_advantage(make_batch()), NO_PENALTY)
    assert torch.equal(flatten_weights(learner), start_weights)
    assert first_metrics.grad_norm is None
    assert (first_metrics.num_skipped_updates, first_metrics.num_skipped_in_a_row) == (1, 1)
    assert (second_metrics.num_skipped_updates, second_metrics.num_skipped_in_a_row) == (1, 2)


@pytest.mark.slow
def test_skipped_update_does_not_affect_later_updates(model_path: str) -> None:
    plain_learner, skipping_learner = make_learner(model_path), make_learner(model_path)
    skipping_learner.train_step(add_infinite_advantage(make_batch(seed=1)), NO_PENALTY)
    plain_metrics, later_metrics = (
        learner.train_step(make_batch(), NO_PENALTY)
        for learner in (plain_learner, skipping_learner)
    )
    assert (plain_metrics.loss, plain_metrics.grad_norm) == (
        later_metrics.loss,
        later_metrics.grad_norm,
    )
    assert later_metrics.num_skipped_in_a_row == 0
    assert torch.equal(flatten_weights(plain_learner), flatten_weights(skipping_learner))


@pytest.mark.slow
def test_only_the_minibatch_with_an_infinite_gradient_is_skipped(model_path: str) -> None:
    learner = make_learner(model_path, num_minibatches=4)
    start_weights = flatten_weights(learner)
    metrics = learner.train_step(add_infinite_advantage(make_batch()), NO_PENALTY)
    assert metrics.num_skipped_updates == 1
    assert metrics.grad_norm is not None and np.isfinite(metrics.grad_norm)
    end_weights = flatten_weights(learner)
    assert torch.isfinite(end_weights).all()
    assert not torch.equal(end_weights, start_weights)


@pytest.mark.slow
def test_all_ranks_skip_an_update_that_fails_on_one_rank(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(model_path)
    start_weights = flatten_weights(learner)
    all_reduce = dist.all_reduce

    def reduce_with_a_failed_rank(tensor: torch.Tensor, op: object = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.MIN:
            tensor.zero_()
        else:
            all_reduce(tensor)

    monkeypatch.setattr(dist, "all_reduce", reduce_with_a_failed_rank)
    assert learner.train_step(make_batch(), NO_PENALTY).num_skipped_updates == 1
    assert torch.equal(flatten_weights(learner), start_weights)


def train_rank(rank: int, folder: str) -> None:
    """Train one of two ranks on an infinite and a finite batch, and save the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    learner = make_learner(f"{folder}/model", max_tokens_per_micro_batch=64)
    metrics = [
        learner.train_step(batch, NO_PENALTY)
        for batch in (add_infinite_advantage(make_batch()), make_batch())
    ]
    torch.save((metrics, flatten_weights(learner)), f"{folder}/rank-{rank}.pt")
    del learner
    leave_process_group()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_skip_the_same_updates(tmp_path: Path) -> None:
    make_policy_folder(tmp_path / "model")
    mp.spawn(train_rank, args=(str(tmp_path),), nprocs=2)
    rank_results: list[tuple[list[StepMetrics], torch.Tensor]] = [
        torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2)
    ]
    for metrics, weights in rank_results:
        assert [row.num_skipped_updates for row in metrics] == [1, 0]
        assert torch.isfinite(weights).all()
    assert torch.equal(rank_results[0][1], rank_results[1][1])
