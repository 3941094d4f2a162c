"""A step that ends early leaves the learner as it was before the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.abandonment import AbandonedStep, StepAbandonedError
from ludus.trainer.learner.learner import Learner
from tests.learner.tiny_policy import make_batch, make_learner

pytestmark = pytest.mark.slow

COEFFICIENTS = Coefficients(learning_rate=1e-2, entropy=0.1, kl=0.0)
NUM_UPDATES = 4
STEP_ID = 5


def train(learner: Learner, seed: int) -> torch.Tensor:
    """Take one training step, and return all weights as one vector."""
    learner.train_step(make_batch(seed=seed), COEFFICIENTS)
    return torch.cat([tensor.flatten() for tensor in learner.gather_weights().values()])


def abandon_step(
    learner: Learner, num_updates: int, *, keeps_restore_point: bool, discards_state: bool
) -> AbandonedStep | None:
    """Train a step that must be abandoned after `num_updates`; return None if it was finished."""
    num_done = 0

    def request_at_update(*_: object) -> None:
        nonlocal num_done
        num_done += 1
        if num_done == num_updates:
            learner.abandonment.request(STEP_ID, discards_state=discards_state)

    hook = register_optimizer_step_post_hook(request_at_update)
    if num_updates == 0:
        learner.abandonment.request(STEP_ID, discards_state=discards_state)
    try:
        learner.train_step(
            make_batch(seed=7),
            COEFFICIENTS,
            step_id=STEP_ID,
            keeps_restore_point=keeps_restore_point,
        )
    except StepAbandonedError as error:
        return error.outcome
    finally:
        hook.remove()
    return None


def make_trained_learner(model_path: str, num_steps: int) -> Learner:
    """Return a learner after some steps of several updates each."""
    learner = make_learner(model_path, num_minibatches=NUM_UPDATES, max_tokens_per_micro_batch=64)
    for step in range(num_steps):
        train(learner, seed=step)
    return learner


@pytest.mark.parametrize(
    ("num_steps", "num_updates", "keeps_restore_point"),
    [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True), (1, 3, True)],
)
def test_abandoned_step_leaves_no_trace(
    model_path: str,
    tmp_path: Path,
    num_steps: int,
    num_updates: int,
    keeps_restore_point: bool,
) -> None:
    learner = make_trained_learner(model_path, num_steps)
    outcome = abandon_step(
        learner, num_updates, keeps_restore_point=keeps_restore_point, discards_state=False
    )
    assert outcome == AbandonedStep(is_restored=True)
    learner.save(tmp_path / "state")
    resumed_learner = make_trained_learner(model_path, 0)
    resumed_learner.load(tmp_path / "state")
    expected_weights = train(make_trained_learner(model_path, num_steps), seed=9)
    assert torch.equal(train(resumed_learner, seed=9), expected_weights)
    assert torch.equal(train(learner, seed=9), expected_weights)


def test_updated_step_without_restore_point_is_finished(model_path: str) -> None:
    learner = make_trained_learner(model_path, 1)
    assert abandon_step(learner, 1, keeps_restore_point=False, discards_state=False) is None


def test_updated_step_is_abandoned_if_its_state_may_be_discarded(model_path: str) -> None:
    learner = make_trained_learner(model_path, 1)
    outcome = abandon_step(learner, 1, keeps_restore_point=False, discards_state=True)
    assert outcome == AbandonedStep(is_restored=False)


def test_request_for_another_step_has_no_effect(model_path: str) -> None:
    learner = make_trained_learner(model_path, 0)
    learner.abandonment.request(STEP_ID - 1, discards_state=True)
    learner.train_step(make_batch(), COEFFICIENTS, step_id=STEP_ID)
