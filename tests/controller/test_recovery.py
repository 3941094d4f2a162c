"""A run survives a lost learner, a stop and a crash, and trains on each group once."""

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
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers, next_iteration

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
    """Use uneven durations, and zero variance in a fifth of the groups."""

    def duration_s(spec: GroupSpec) -> float:
        return random.Random(spec.index).lognormvariate(-6, 1.0)

    workers.duration_s = duration_s
    workers.rewards = lambda spec: (1, 1) if spec.index % 5 == 0 else (1, -1)


def die_in(run: SimulatedRun, *steps: int) -> None:
    """Kill the learner in the first attempt of each of these steps."""
    to_come = set(steps)

    async def in_step(step: int) -> None:
        await asyncio.sleep(0.005)
        if step in to_come:
            to_come.discard(step)
            run.learner.die()

    run.learner.in_step = in_step


@pytest.mark.slow
async def test_lost_learner_restarts_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    die_in(run, 7)
    state = await run.go()
    assert (state.step, state.learner_restarts, run.learner.num_restarts) == (NUM_STEPS, 1, 1)
    assert run.learner.steps == NUM_STEPS
    assert [row.step for row in run.rows] == list(range(1, NUM_STEPS + 1)), "each step once"
    games = [row.num_games_trained for row in run.rows]
    assert games == [8 * step for step in range(1, NUM_STEPS + 1)]
    assert state.num_groups_rolled_back >= 2 * 4, "at least those of the steps that were lost"


async def test_learner_lost_before_the_first_checkpoint_starts_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    die_in(run, 2)
    state = await run.go()
    assert (state.step, state.learner_restarts) == (NUM_STEPS, 1)
    assert [row.step for row in run.rows] == list(range(1, NUM_STEPS + 1))


async def test_samples_of_rolled_back_weights_are_not_trained_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    die_in(run, 3, 7)
    sampled_by: dict[int, tuple[int, int]] = {}
    prepare_run = run.prepare

    def watch(workers: SimulatedWorkers, controller: Controller) -> None:
        prepare_run(workers, controller)
        duration_s = workers.duration_s

        def remember(spec: GroupSpec) -> float:
            assert workers.published_weights is not None
            _, life, _, step = workers.published_weights.manifest.content_hash.split()
            sampled_by[spec.index] = int(life), int(step)
            return duration_s(spec)

        workers.duration_s = remember

    run.prepare = watch
    await run.go()
    for groups in run.batches.values():
        for group in groups:
            life, step = sampled_by[group.index]
            # The first learner died before its first checkpoint, the second after that of step 5.
            assert life == 2 or (life == 1 and step <= 5)
    assert len(set(run.trained)) == len(run.trained) == 4 * NUM_STEPS


async def test_learner_lost_too_often_stops_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, max_learner_restarts=2)
    die_in(run, 6, 7, 8)
    with pytest.raises(LearnerLostError, match=r"restarted 2 times.*--resume"):
        await run.go()


def lose_buffer_in(run: SimulatedRun, step: int) -> None:
    """Kill the buffer during this step."""
    prepare_run = run.prepare

    def lose(workers: SimulatedWorkers, controller: Controller) -> None:
        prepare_run(workers, controller)

        async def in_step(number: int) -> None:
            await asyncio.sleep(0.005)
            if number == step:
                workers.buffer.die()
                await asyncio.sleep(0.02)

        run.learner.in_step = in_step

    run.prepare = lose


async def test_lost_buffer_stops_the_run_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    prepare_run = run.prepare
    lose_buffer_in(run, 6)
    with pytest.raises(
        BufferLostError, match=r"the buffer died\ncontinue with --resume from step 7"
    ):
        await run.go()
    saved = read_state(find_newest_checkpoint(tmp_path / "run" / "checkpoints"), RunState)
    assert saved.step == run.learner.steps == 7
    assert saved.buffered_groups == []
    assert [row.step for row in run.rows] == list(range(1, 8))
    run.prepare, run.learner.in_step = prepare_run, next_iteration
    state = await run.go(resume=True)
    assert state.step == NUM_STEPS
    assert len(set(run.trained)) == len(run.trained) == 4 * NUM_STEPS


async def test_learner_lost_with_the_buffer_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    lose_buffer_in(run, 6)
    save = run.learner.save

    async def save_or_die(state_folder: Path, model_folder: Path) -> list[SavedFile]:
        if run.learner.steps == 7:
            run.learner.die()
        return await save(state_folder, model_folder)

    monkeypatch.setattr(run.learner, "save", save_or_die)
    with pytest.raises(
        BufferLostError, match=r"the buffer died\ncontinue with --resume from step 5"
    ):
        await run.go()
    assert read_state(find_newest_checkpoint(tmp_path / "run" / "checkpoints"), RunState).step == 5


async def test_weights_of_a_lost_learner_count_as_its_loss(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    prepare_run = run.prepare
    lost: list[int] = []

    def lose_while_delivering(workers: SimulatedWorkers, controller: Controller) -> None:
        prepare_run(workers, controller)

        async def in_delivery(published: PublishedWeights) -> None:
            if published.manifest.version == 6 and not lost:
                lost.append(6)
                run.learner.die()
                raise WeightSyncError("the object's owner has died")

        workers.in_delivery = in_delivery

    run.prepare = lose_while_delivering
    state = await run.go()
    assert (state.step, state.learner_restarts) == (NUM_STEPS, 1)


async def test_stopped_run_loses_no_group(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    prepare_run = run.prepare

    def stop_in_step(workers: SimulatedWorkers, controller: Controller) -> None:
        prepare_run(workers, controller)

        async def in_step(step: int) -> None:
            if step == 6:
                controller.stop_request.set()

        run.learner.in_step = in_step

    run.prepare = stop_in_step
    state = await run.go()
    assert state.step == 7, "the step it was in"
    saved = read_state(find_newest_checkpoint(tmp_path / "run" / "checkpoints"), RunState)
    assert saved.step == 7
    under_way = [spec.index for spec in saved.unfinished_groups]
    under_way += [group.index for group in saved.buffered_groups]
    assert under_way, "sampling was ahead"
    assert set(under_way).isdisjoint(run.trained)

    run.prepare = prepare_run
    state = await run.go(resume=True)
    assert state.step == NUM_STEPS
    assert set(under_way) <= set(run.trained) | {index for index in under_way if index % 5 == 0}
    assert len(set(run.trained)) == len(run.trained)
    counts = [row.values["num_episodes"] for row in run.rows]
    assert sum(counts) == state.games_played


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_killed_run_trains_on_every_group_once(tmp_path: Path, seed: int) -> None:
    run = make_run(tmp_path, checkpoint_every_steps=1)
    first = asyncio.create_task(run.go())
    chance = random.Random(seed)
    while not list((tmp_path / "run" / "checkpoints").glob("step-*[0-9]")):
        await asyncio.sleep(0.001)
    await asyncio.sleep(chance.random() * 0.1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    state = await run.go(resume=True)
    assert state.step == NUM_STEPS
    assert len(set(run.trained)) == len(run.trained) == 4 * NUM_STEPS
    alive = [index for index in range(max(run.trained)) if index % 5]
    missing = set(alive) - set(run.trained)
    assert len(missing) <= 4, "nothing but what still waits at the end"


async def test_on_policy_resume_trains_on_the_same_groups(
    tmp_path: Path,
) -> None:
    complete = make_run(tmp_path / "whole", max_staleness=0)
    whole_state = await complete.go()
    parts = make_run(tmp_path / "parts", max_staleness=0, num_steps=5)
    await parts.go()
    parts.settings["training"]["num_steps"] = NUM_STEPS
    state = await parts.go(resume=True)
    indices = {s: [g.index for g in groups] for s, groups in complete.batches.items()}
    assert {s: [g.index for g in groups] for s, groups in parts.batches.items()} == indices
    measured = {"num_episodes", "num_groups", "num_groups_dead", "reward_mean", "staleness_max"}
    for row, other in zip(complete.rows, parts.rows, strict=True):
        assert {m: row.values[m] for m in measured} == {m: other.values[m] for m in measured}
    assert state.games_played == whole_state.games_played


async def test_resume_without_an_environment_uses_the_others(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=5)
    run.settings["environments"] = {"coins": {}, "dice": {}}
    await run.go()
    saved = read_state(find_newest_checkpoint(tmp_path / "run" / "checkpoints"), RunState)
    assert {spec.environment for spec in saved.unfinished_groups} == {"coins", "dice"}
    del run.settings["environments"]
    run.settings["training"]["num_steps"] = 8
    await run.go(resume=True)
    assert {group.environment for group in run.batches[7]} == {"coins"}
    assert len(set(run.trained)) == len(run.trained)
