"""A run recovers from a lost learner, a stop and a crash, and trains on each group once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.errors import BufferLostError, LearnerLostError, WeightSyncError
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.types import GroupSpec, SavedFile
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.run.checkpoint import RunState, find_newest_checkpoint, read_state
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers, wait_one_iteration

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 12


def make_run(folder: Path, *, num_steps: int = NUM_STEPS, **training: Any) -> SimulatedRun:
    """Return a run that writes a checkpoint every fifth step."""
    training = {
        "num_steps": num_steps,
        "groups_per_step": 4,
        "max_staleness": 1,
        "checkpoint_every_steps": 5,
    } | training
    run = SimulatedRun(folder, {"training": training})
    run.prepare = prepare
    return run


def prepare(workers: SimulatedWorkers, controller: Controller) -> None:
    """Vary the durations of groups, and make every fifth group zero-variance."""

    def draw_duration_s(spec: GroupSpec) -> float:
        return random.Random(spec.index).lognormvariate(-6, 1.0)

    workers.duration_s = draw_duration_s
    workers.rewards = lambda spec: (1, 1) if spec.index % 5 == 0 else (1, -1)


def kill_learner_in_steps(run: SimulatedRun, *steps: int) -> None:
    """Kill the learner in the first attempt of each of these steps."""
    remaining_steps = set(steps)

    async def on_step(step: int) -> None:
        await asyncio.sleep(0.005)
        if step in remaining_steps:
            remaining_steps.discard(step)
            run.learner.die()

    run.learner.on_step = on_step


@pytest.mark.slow
async def test_lost_learner_restarts_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    kill_learner_in_steps(run, 7)
    state = await run.train()
    assert (state.step, state.learner_restarts, run.learner.num_restarts) == (NUM_STEPS, 1, 1)
    assert run.learner.num_steps == NUM_STEPS
    assert [row.step for row in run.rows] == list(range(1, NUM_STEPS + 1)), (
        "a step is missing or repeated"
    )
    num_games = [row.num_games_trained for row in run.rows]
    assert num_games == [8 * step for step in range(1, NUM_STEPS + 1)]
    assert state.num_groups_rolled_back >= 2 * 4, "too few groups were rolled back"


@pytest.mark.slow
async def test_learner_lost_before_first_checkpoint_restarts_from_step_zero(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    kill_learner_in_steps(run, 2)
    state = await run.train()
    assert (state.step, state.learner_restarts) == (NUM_STEPS, 1)
    assert [row.step for row in run.rows] == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
async def test_samples_of_rolled_back_weights_are_not_trained_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    kill_learner_in_steps(run, 3, 7)
    origins: dict[int, tuple[int, int]] = {}
    prepare_run = run.prepare

    def prepare_and_record(workers: SimulatedWorkers, controller: Controller) -> None:
        prepare_run(workers, controller)
        duration_s = workers.duration_s

        def record_origin(spec: GroupSpec) -> float:
            assert workers.published_weights is not None
            _, num_restarts, _, step = workers.published_weights.manifest.content_hash.split()
            origins[spec.index] = int(num_restarts), int(step)
            return duration_s(spec)

        workers.duration_s = record_origin

    run.prepare = prepare_and_record
    await run.train()
    for groups in run.batches.values():
        for group in groups:
            num_restarts, step = origins[group.index]
            # The first learner died before any checkpoint was written. The second learner died
            # after the checkpoint of step 5.
            assert num_restarts == 2 or (num_restarts == 1 and step <= 5)
    assert len(set(run.trained_indices)) == len(run.trained_indices) == 4 * NUM_STEPS


@pytest.mark.slow
async def test_learner_lost_too_often_stops_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, max_learner_restarts=2)
    kill_learner_in_steps(run, 6, 7, 8)
    with pytest.raises(
        LearnerLostError, match=r"(?s)restarted 2 times.*continue with resume='always'"
    ):
        await run.train()


def lose_buffer_in_step(run: SimulatedRun, step: int) -> None:
    """Kill the buffer during this step."""
    prepare_run = run.prepare

    def prepare_buffer_loss(workers: SimulatedWorkers, controller: Controller) -> None:
        prepare_run(workers, controller)

        async def on_step(step_index: int) -> None:
            await asyncio.sleep(0.005)
            if step_index == step:
                workers.buffer.die()
                await asyncio.sleep(0.02)

        run.learner.on_step = on_step

    run.prepare = prepare_buffer_loss


@pytest.mark.slow
async def test_lost_buffer_stops_the_run_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    prepare_run = run.prepare
    lose_buffer_in_step(run, 6)
    with pytest.raises(
        BufferLostError, match=r"the buffer died\ncontinue with resume='always' from step 7"
    ):
        await run.train()
    saved_state = read_state(find_newest_checkpoint(tmp_path / "run" / "checkpoints"), RunState)
    assert saved_state.step == run.learner.num_steps == 7
    assert saved_state.buffered_groups == []
    assert [row.step for row in run.rows] == list(range(1, 8))
    run.prepare, run.learner.on_step = prepare_run, wait_one_iteration
    state = await run.train(resume=True)
    assert state.step == NUM_STEPS
    assert len(set(run.trained_indices)) == len(run.trained_indices) == 4 * NUM_STEPS


async def test_learner_lost_with_the_buffer_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    lose_buffer_in_step(run, 6)
    save = run.learner.save

    async def save_or_die(state_folder: Path, model_folder: Path) -> list[SavedFile]:
        if run.learner.num_steps == 7:
            run.learner.die()
        return await save(state_folder, model_folder)

    monkeypatch.setattr(run.learner, "save", save_or_die)
    with pytest.raises(
        BufferLostError, match=r"the buffer died\ncontinue with resume='always' from step 5"
    ):
        await run.train()
    assert read_state(find_newest_checkpoint(tmp_path / "run" / "checkpoints"), RunState).step == 5


@pytest.mark.slow
async def test_failed_delivery_of_a_lost_learner_restarts_the_learner(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    prepare_run = run.prepare
    lost_versions: list[int] = []

    def prepare_learner_loss(workers: SimulatedWorkers, controller: Controller) -> None:
        prepare_run(workers, controller)

        async def on_delivery(weights: PublishedWeights) -> None:
            if weights.manifest.version == 6 and not lost_versions:
                lost_versions.append(6)
                run.learner.die()
                raise WeightSyncError("the object's owner has died")

        workers.on_delivery = on_delivery

    run.prepare = prepare_learner_loss
    state = await run.train()
    assert (state.step, state.learner_restarts) == (NUM_STEPS, 1)


@pytest.mark.slow
async def test_stopped_run_loses_no_group(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    prepare_run = run.prepare

    def prepare_stop(workers: SimulatedWorkers, controller: Controller) -> None:
        prepare_run(workers, controller)

        async def on_step(step: int) -> None:
            if step == 6:
                controller.stop_request.set()

        run.learner.on_step = on_step

    run.prepare = prepare_stop
    state = await run.train()
    assert state.step == 7, "the current step did not finish"
    saved_state = read_state(find_newest_checkpoint(tmp_path / "run" / "checkpoints"), RunState)
    assert saved_state.step == 7
    unfinished_indices = [spec.index for spec in saved_state.unfinished_groups]
    unfinished_indices += [group.index for group in saved_state.buffered_groups]
    assert unfinished_indices, "sampling was not ahead of training"
    assert set(unfinished_indices).isdisjoint(run.trained_indices)

    run.prepare = prepare_run
    state = await run.train(resume=True)
    assert state.step == NUM_STEPS
    assert set(unfinished_indices) <= set(run.trained_indices) | {
        index for index in unfinished_indices if index % 5 == 0
    }
    assert len(set(run.trained_indices)) == len(run.trained_indices)
    counts = [row.values["num_episodes"] for row in run.rows]
    assert sum(counts) == state.games_played


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_killed_run_trains_on_every_group_once(tmp_path: Path, seed: int) -> None:
    run = make_run(tmp_path, checkpoint_every_steps=1)
    first_attempt = asyncio.create_task(run.train())
    generator = random.Random(seed)
    while not list((tmp_path / "run" / "checkpoints").glob("step-*[0-9]")):
        await asyncio.sleep(0.001)
    await asyncio.sleep(generator.random() * 0.1)
    first_attempt.cancel()
    await asyncio.gather(first_attempt, return_exceptions=True)
    state = await run.train(resume=True)
    assert state.step == NUM_STEPS
    assert len(set(run.trained_indices)) == len(run.trained_indices) == 4 * NUM_STEPS
    informative_indices = [index for index in range(max(run.trained_indices)) if index % 5]
    missing_indices = set(informative_indices) - set(run.trained_indices)
    assert len(missing_indices) <= 4, "too many groups are not trained on"


@pytest.mark.slow
async def test_on_policy_resume_trains_on_the_same_groups(
    tmp_path: Path,
) -> None:
    complete_run = make_run(tmp_path / "whole", max_staleness=0)
    complete_state = await complete_run.train()
    resumed_run = make_run(tmp_path / "parts", max_staleness=0, num_steps=5)
    await resumed_run.train()
    resumed_run.settings["training"]["num_steps"] = NUM_STEPS
    state = await resumed_run.train(resume=True)
    indices = {
        step: [group.index for group in groups] for step, groups in complete_run.batches.items()
    }
    assert {
        step: [group.index for group in groups] for step, groups in resumed_run.batches.items()
    } == indices
    metrics = {"num_episodes", "num_groups", "num_groups_dead", "reward_mean", "staleness_max"}
    for row, resumed_row in zip(complete_run.rows, resumed_run.rows, strict=True):
        assert {metric: row.values[metric] for metric in metrics} == {
            metric: resumed_row.values[metric] for metric in metrics
        }
    assert state.games_played == complete_state.games_played


async def test_resume_ignores_groups_of_a_removed_environment(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=5)
    run.settings["environments"] = {"coins": {}, "dice": {}}
    await run.train()
    saved_state = read_state(find_newest_checkpoint(tmp_path / "run" / "checkpoints"), RunState)
    assert {spec.environment for spec in saved_state.unfinished_groups} == {"coins", "dice"}
    del run.settings["environments"]
    run.settings["training"]["num_steps"] = 8
    await run.train(resume=True)
    assert {group.environment for group in run.batches[7]} == {"coins"}
    assert len(set(run.trained_indices)) == len(run.trained_indices)


async def test_entropy_control_continues_after_a_stop_and_a_lost_learner(tmp_path: Path) -> None:
    """The simulated learner reports an entropy of 0, so the coefficient rises in each step."""
    control = {"target": 0.5, "change": 0.1, "max_coef": 10.0}
    run = make_run(tmp_path, num_steps=7)
    run.settings["algorithm"] = {"entropy_control": control}
    await run.train()
    run.settings["training"]["num_steps"] = NUM_STEPS
    kill_learner_in_steps(run, 9)
    await run.train(resume=True)
    coefficients = [row.values["entropy_coef"] for row in run.rows]
    assert coefficients == pytest.approx([0.1 * step for step in range(NUM_STEPS)])


async def test_learner_replaces_ranks_after_the_delivery_and_saves_the_limit(
    tmp_path: Path,
) -> None:
    run, delivered_versions, versions_at_step = make_run(tmp_path), [], []

    def prepare_slow_delivery(workers: SimulatedWorkers, controller: Controller) -> None:
        async def on_delivery(weights: PublishedWeights) -> None:
            await asyncio.sleep(0.02)
            delivered_versions.append(weights.manifest.version)

        workers.on_delivery = on_delivery

    async def run_out_of_memory(step: int) -> None:
        if step == 6:
            assert run.learner.wait_for_fetches is not None
            await run.learner.wait_for_fetches()
            versions_at_step.append(delivered_versions[-1])
            run.learner.reduced_max_tokens = 512

    run.prepare, run.learner.on_step = prepare_slow_delivery, run_out_of_memory
    state = await run.train()
    assert versions_at_step == [6]
    assert state.reduced_max_tokens == 512
    checkpoint = find_newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert read_state(checkpoint, RunState).reduced_max_tokens == 512
