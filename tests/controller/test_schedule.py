"""Schedules of the learning rate and the coefficients."""

from __future__ import annotations

import math

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.trainer.run.checkpoint import RunState
from ludus.trainer.run.schedule import CheckpointSchedule, compute_coefficients


def make_run(num_steps: int, *, algorithm: dict[str, object] | None = None, **learner: object):
    """Return a run of `num_steps` with these learner settings."""
    training = {"num_steps": num_steps}
    sections = {"training": training, "learner": learner, "algorithm": algorithm or {}}
    return LanguageModelRun.model_validate(sections)


def compute_learning_rates(run: LanguageModelRun) -> list[float]:
    """Return the learning rate of each step."""
    return [compute_coefficients(run, step).learning_rate for step in range(run.training.num_steps)]


def test_constant_rate_after_warmup() -> None:
    run = make_run(5, learning_rate=0.4, warmup_steps=4)
    assert compute_learning_rates(run) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_linear_rate_reaches_its_final_value_in_the_last_step() -> None:
    run = make_run(5, learning_rate=1.0, learning_rate_final=0.2, schedule="linear")
    assert compute_learning_rates(run) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_rate_reaches_the_midpoint_in_the_middle() -> None:
    run = make_run(
        11, learning_rate=1.0, learning_rate_final=0.2, schedule="cosine", warmup_steps=2
    )
    learning_rates = compute_learning_rates(run)
    assert learning_rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert learning_rates[6] == pytest.approx(0.6)
    assert learning_rates[4] == pytest.approx(0.6 + 0.4 * math.cos(math.pi / 4))
    assert learning_rates[-1] == pytest.approx(0.2)


def test_rate_only_rises_if_warmup_is_longer_than_the_run() -> None:
    learning_rates = compute_learning_rates(
        make_run(3, learning_rate=1.0, schedule="cosine", warmup_steps=10)
    )
    assert learning_rates == pytest.approx([0.1, 0.2, 0.3])


def test_coefficients_reach_their_final_values_at_the_anneal_fraction() -> None:
    run = make_run(
        11,
        algorithm={
            "entropy_coef": 0.1,
            "entropy_coef_final": 0.0,
            "kl_coef": 0.2,
            "anneal_fraction": 0.5,
        },
    )
    entropies = [compute_coefficients(run, step).entropy for step in range(11)]
    assert entropies == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02, *[0.0] * 6])
    assert {compute_coefficients(run, step).kl for step in range(11)} == {0.2}


def test_entropy_control_acts_at_and_below_its_target() -> None:
    control = {"target": 0.5, "change": 0.05, "min_coef": 0.05, "max_coef": 0.2}
    run = make_run(9, algorithm={"entropy_coef": 0.1, "entropy_control": control})
    state, coefficients = RunState(), []
    for entropy in (0.6, 0.5, 0.4, 0.3, 0.3, 0.7, math.nan, 0.4, 0.4):
        coefficients.append(compute_coefficients(run, state.step, state.entropy).entropy)
        state.end_step(run.algorithm, entropy)
    assert coefficients == pytest.approx([0, 0, 0.1, 0.15, 0.2, 0.2, 0, 0, 0.2])


class FakeClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def list_checkpoint_steps(
    step_s: float, checkpoint_s: float, *, every_steps: int | None, every_s: float | None
) -> list[int]:
    """Return the steps, of 40, after which a checkpoint is due."""
    clock = FakeClock()
    schedule = CheckpointSchedule(every_steps, every_s, clock)
    steps = []
    for step in range(1, 41):
        clock.now_s += step_s
        schedule.end_step()
        if schedule.is_due(step):
            steps.append(step)
            clock.now_s += checkpoint_s
            schedule.end_checkpoint(checkpoint_s)
    return steps


@pytest.mark.parametrize(
    ("step_s", "checkpoint_s", "expected_steps"),
    [
        (10.0, 0.1, [12, 24, 36]),  # every 120 s
        (90.0, 0.1, list(range(1, 41))),  # two steps take longer than 120 s
        (500.0, 0.1, list(range(1, 41))),
        (10.0, 12.0, [12, 36]),  # at most a twentieth of the time: every 240 s
    ],
)
def test_checkpoints_by_time(step_s: float, checkpoint_s: float, expected_steps: list[int]) -> None:
    steps = list_checkpoint_steps(step_s, checkpoint_s, every_steps=None, every_s=120.0)
    assert steps == expected_steps


def test_checkpoints_by_steps() -> None:
    assert list_checkpoint_steps(90.0, 0.1, every_steps=15, every_s=None) == [15, 30]
    assert list_checkpoint_steps(10.0, 0.1, every_steps=10, every_s=120.0) == [10, 20, 30, 40]
