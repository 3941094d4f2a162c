"""An update whose gradient is not finite is skipped, on all ranks or on none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ludus.trainer.core.ragged import Ragged
from ludus.trainer.core.types import Batch, Coefficients
from ludus.trainer.learner.learner import Learner
from ludus.trainer.learner.process_group import leave_process_group
from ludus.trainer.learner.step_metrics import StepMetrics
from tests.learner.tiny_policy import make_batch, make_learner, make_policy_folder

PLAIN = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.0)


def spoilt(batch: Batch) -> Batch:
    """The batch with one advantage that is not finite."""
    advantages = [row.copy() for row in batch.advantages]
    advantages[0][np.flatnonzero(advantages[0])[0]] = np.inf
    return replace(batch, advantages=Ragged.of(advantages, np.float32))


def weights_of(learner: Learner) -> torch.Tensor:
    """All weights as one vector."""
    return torch.cat([tensor.flatten() for tensor in learner.full_state().values()])


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(model_path: str) -> None:
    learner = make_learner(model_path)
    before = weights_of(learner)
    first = learner.train_step(spoilt(make_batch()), PLAIN)
    second = learner.train_step(spoilt(make_batch()), PLAIN)
    assert torch.equal(weights_of(learner), before)
    assert first.grad_norm is None
    assert (first.num_skipped_updates, first.num_skipped_in_a_row) == (1, 1)
    assert (second.num_skipped_updates, second.num_skipped_in_a_row) == (1, 2)


def test_after_a_skipped_update_training_goes_on_as_if_it_had_not_been(model_path: str) -> None:
    plain, spoilt_once = make_learner(model_path), make_learner(model_path)
    spoilt_once.train_step(spoilt(make_batch(seed=1)), PLAIN)
    one, other = (learner.train_step(make_batch(), PLAIN) for learner in (plain, spoilt_once))
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert other.num_skipped_in_a_row == 0
    assert torch.equal(weights_of(plain), weights_of(spoilt_once))


def test_of_several_minibatches_only_the_spoilt_one_is_skipped(model_path: str) -> None:
    learner = make_learner(model_path, num_minibatches=4)
    before = weights_of(learner)
    metrics = learner.train_step(spoilt(make_batch()), PLAIN)
    assert metrics.num_skipped_updates == 1
    assert metrics.grad_norm is not None and np.isfinite(metrics.grad_norm)
    after = weights_of(learner)
    assert torch.isfinite(after).all()
    assert not torch.equal(after, before)


def test_a_rank_skips_what_another_rank_cannot_take(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(model_path)
    before = weights_of(learner)
    reduce = dist.all_reduce

    def with_a_spoilt_rank(tensor: torch.Tensor, op: object = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.MIN:
            tensor.zero_()
        else:
            reduce(tensor)

    monkeypatch.setattr(dist, "all_reduce", with_a_spoilt_rank)
    assert learner.train_step(make_batch(), PLAIN).num_skipped_updates == 1
    assert torch.equal(weights_of(learner), before)


def train_spoilt(rank: int, folder: str) -> None:
    """Take a spoilt and a good step as one of two ranks; leave what came of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    learner = make_learner(f"{folder}/model", max_tokens_per_micro_batch=64)
    metrics = [learner.train_step(b, PLAIN) for b in (spoilt(make_batch()), make_batch())]
    torch.save((metrics, weights_of(learner)), f"{folder}/rank-{rank}.pt")
    del learner
    leave_process_group()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_agree_on_what_they_skip(tmp_path: Path) -> None:
    make_policy_folder(tmp_path / "model")
    mp.spawn(train_spoilt, args=(str(tmp_path),), nprocs=2)
    outcomes: list[tuple[list[StepMetrics], torch.Tensor]] = [
        torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2)
    ]
    for metrics, weights in outcomes:
        assert [m.num_skipped_updates for m in metrics] == [1, 0]
        assert torch.isfinite(weights).all()
    assert torch.equal(outcomes[0][1], outcomes[1][1])
