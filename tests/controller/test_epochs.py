"""Each epoch uses each row of a data set once, despite lost groups, stops and resumes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import read_metrics
from ludus.trainer.core.types import GroupSpec
from ludus.trainer.data.mixture import Mixture, MixtureState
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.run.schedule import resolve_num_steps
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers
from tests.controller.test_recovery import kill_learner_in_steps

pytestmark = pytest.mark.timeout(120)

NUM_ROWS = 48


def make_run(folder: Path, **training: Any) -> SimulatedRun:
    """Return a run of two epochs over 48 rows, with uneven durations and lost groups."""
    settings = {
        "training": {"groups_per_step": 8, "num_epochs": 2, "checkpoint_every_steps": 3} | training,
        "algorithm": {"zero_variance_groups": "keep"},
    }
    run = SimulatedRun(folder, settings, num_tasks={"coins": NUM_ROWS})
    run.prepare = prepare
    return run


def prepare(workers: SimulatedWorkers, controller: Controller) -> None:
    """Vary the durations, make every third group zero-variance, and lose every ninth group."""

    def draw_duration_s(spec: GroupSpec) -> float:
        return random.Random(spec.index).lognormvariate(-6, 1.0)

    workers.duration_s = draw_duration_s
    workers.rewards = lambda spec: (1, 1) if spec.index % 3 == 0 else (1, -1)
    workers.kills_worker = lambda spec: spec.index % 9 == 4


def list_trained_seeds(run: SimulatedRun) -> list[int]:
    """Return the trained seeds, in the order of the steps."""
    seeds = {spec.index: spec.seeds[0] for spec in run.started_groups}
    return [seeds[index] for index in run.trained_indices]


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_each_epoch_trains_on_each_row_once(tmp_path: Path, max_staleness: int) -> None:
    run = make_run(tmp_path, max_staleness=max_staleness)
    state = await run.train()
    assert state.step == 2 * NUM_ROWS // 8
    assert sorted(list_trained_seeds(run)) == list(range(2 * NUM_ROWS))
    assert state.episodes_lost > 10
    assert max(spec.seeds[0] for spec in run.started_groups) < 2 * NUM_ROWS, (
        "too many rows were played"
    )


@pytest.mark.slow
async def test_resumed_run_neither_skips_nor_repeats_rows(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, num_epochs=1)
    state = await run.train()
    assert sorted(list_trained_seeds(run)) == list(range(NUM_ROWS))
    run.settings["training"]["num_epochs"] = 2
    state = await run.train(resume=True)
    assert state.step == 12
    assert sorted(list_trained_seeds(run)) == list(range(2 * NUM_ROWS))


async def test_run_stopped_within_an_epoch_continues_with_the_remaining_rows(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, num_epochs=1)

    def stop_early(workers: SimulatedWorkers, controller: Controller) -> None:
        prepare(workers, controller)
        previous_on_step = run.learner.on_step

        async def on_step(step: int) -> None:
            await previous_on_step(step)
            if step == 2:
                controller.stop_request.set()

        run.learner.on_step = on_step

    run.prepare = stop_early
    assert (await run.train()).step == 3
    run.prepare = prepare
    await run.train(resume=True)
    assert sorted(list_trained_seeds(run)) == list(range(NUM_ROWS))


@pytest.mark.slow
async def test_restarted_learner_repeats_the_rows_after_the_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    kill_learner_in_steps(run, 4, 8)
    state = await run.train()
    assert state.learner_restarts == 2
    assert sorted(list_trained_seeds(run)) == list(range(2 * NUM_ROWS))


@pytest.mark.slow
async def test_phase_rows_contain_the_number_of_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    await run.train()
    rows = read_metrics(tmp_path / "run")
    assert {row.num_steps for row in rows if row.kind == "phase"} == {12}


# -- task order -------------------------------------------------------------------------


def make_mixture(state: MixtureState, **num_tasks: int) -> Mixture:
    return Mixture(make_mixed_run("rows", "coins"), state, num_tasks)


def make_mixed_run(*names: str, **rollout: Any) -> LanguageModelRun:
    environments = {name: {} for name in names}
    sections = {"environments": environments, "rollout": {"group_size": 2, **rollout}}
    return LanguageModelRun.model_validate(sections)


def test_lost_group_repeats_the_same_task_three_times():
    mixture = make_mixture(MixtureState(), rows=10)
    specs = [mixture.take_next_group() for _ in range(4)]
    assert [spec.seeds for spec in specs if spec.environment == "rows"] == [(0, 0), (1, 1)]
    first_spec = next(spec for spec in specs if spec.environment == "rows")
    assert mixture.replace_group(first_spec).seeds == (2, 2)
    repeated_spec = first_spec
    for _ in range(3):
        previous_spec, repeated_spec = (
            repeated_spec,
            mixture.replace_group(repeated_spec, is_lost=True),
        )
        assert repeated_spec.seeds == first_spec.seeds and repeated_spec.index > previous_spec.index
    assert mixture.replace_group(repeated_spec, is_lost=True).seeds == (3, 3)
    assert mixture.reissue_group(first_spec).seeds == first_spec.seeds
    coins_spec = next(spec for spec in specs if spec.environment == "coins")
    assert mixture.replace_group(coins_spec, is_lost=True).seeds != coins_spec.seeds


def test_task_order_continues_with_an_added_environment() -> None:
    state = MixtureState()
    mixture = make_mixture(state, rows=10)
    specs = [mixture.take_next_group() for _ in range(6)]
    seeds = [spec.seeds[0] for spec in specs if spec.environment == "rows"]
    run = make_mixed_run("rows", "dice", "coins")
    extended_mixture = Mixture(run, MixtureState(**get_state_values(state)), {"rows": 10})
    extended_specs = [extended_mixture.take_next_group() for _ in range(6)]
    seeds += [spec.seeds[0] for spec in extended_specs if spec.environment == "rows"]
    assert seeds == [0, 1, 2, 3, 4]
    assert {spec.index for spec in specs}.isdisjoint(spec.index for spec in extended_specs)


def get_state_values(state: MixtureState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in state.__slots__}


def test_group_of_distinct_seeds_uses_one_task_per_episode() -> None:
    run = make_mixed_run("rows", group_size=3, group_seed="independent")
    mixture = Mixture(run, MixtureState(), {"rows": 10})
    assert [mixture.take_next_group().seeds for _ in range(2)] == [(0, 1, 2), (3, 4, 5)]


def test_training_seeds_wrap_below_warm_start_seeds() -> None:
    last_seed = 2**30 // 10 * 10 - 1
    state = MixtureState(num_new_tasks={"rows": last_seed})
    mixture = Mixture(make_mixed_run("rows"), state, {"rows": 10})
    assert [mixture.take_next_group().seeds for _ in range(2)] == [(last_seed, last_seed), (0, 0)]


# -- steps -----------------------------------------------------------------------------


def make_config(**training: Any) -> LanguageModelRun:
    sections = {"environment": {"package": "coins"}, "algorithm": {"zero_variance_groups": "keep"}}
    return LanguageModelRun.model_validate(sections | {"training": training})


@pytest.mark.parametrize(
    ("num_epochs", "num_tasks", "num_steps"),
    [(1, 64, 8), (2, 64, 16), (1, 65, 9), (0.5, 64, 4), (0.1, 240, 3), (1, 3, 1)],
)
def test_epochs_are_converted_to_steps(num_epochs: float, num_tasks: int, num_steps: int) -> None:
    run = resolve_num_steps(
        make_config(num_epochs=num_epochs, groups_per_step=8), {"coins": num_tasks}
    )
    assert run.training.num_steps == num_steps


def test_epochs_need_a_number_of_tasks() -> None:
    with pytest.raises(ConfigError, match="every seed of 'coins' is another task"):
        resolve_num_steps(make_config(num_epochs=1), {})
    assert resolve_num_steps(make_config(num_steps=7), {}).training.num_steps == 7


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"environments": {"a": {}, "b": {}}}, "tasks of one environment, but the run has 2"),
        ({}, "zero_variance_groups = 'replace' skips groups of equal rewards"),
    ],
)
def test_configuration_that_does_not_support_epochs_is_refused(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageModelRun.model_validate(sections | {"training": {"num_epochs": 1}})
