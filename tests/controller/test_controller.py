"""The training and rollout loops overlap within the staleness limit and stop after a failure."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.errors import CanaryError, UnavailableError, WeightSyncError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import EvalReport, read_metrics
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.types import GroupSpec
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.driver.loops.delivery import Delivery
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers
from tests.env.polling import wait_until

pytestmark = pytest.mark.timeout(120)


def make_run(
    folder: Path,
    *,
    num_steps: int = 6,
    max_staleness: int = 1,
    groups_per_step: int = 4,
    **settings: Any,
) -> SimulatedRun:
    training = {
        "num_steps": num_steps,
        "groups_per_step": groups_per_step,
        "max_staleness": max_staleness,
        **settings.pop("training", {}),
    }
    return SimulatedRun(folder, {"training": training, **settings})


def draw_duration_s(spec: GroupSpec) -> float:
    """Return the duration of a group in seconds; a few groups are slow."""
    return random.Random(spec.index).lognormvariate(-7, 1.0)


async def test_curriculum_logs_newly_opened_environments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(
        tmp_path,
        environments={"easy": {}, "hard": {}},
        curriculum={"unlock_at": 0.5, "window_groups": 10},
    )
    caplog.set_level(logging.INFO)
    await run.train()
    rows = read_metrics(tmp_path / "run")
    (unlock_row,) = [row for row in rows if TrainMetric.NUM_UNLOCKS in row.values]
    assert (unlock_row.kind, unlock_row.environment) == ("event", "hard")
    # Each step has four groups, so the third step fills the window.
    assert (unlock_row.step, unlock_row.num_games_trained) == (3, 3 * 4 * 2)
    num_open_environments = [row.values[TrainMetric.NUM_ENVIRONMENTS_OPEN] for row in run.rows]
    assert num_open_environments == [1, 1, 2, 2, 2, 2]
    assert "step 3: the curriculum opens environment 'hard'" in caplog.messages


@pytest.mark.slow
async def test_delivery_overlaps_with_the_next_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, max_staleness=1)
    second_step_started = asyncio.Event()

    async def on_step(step: int) -> None:
        if step == 1:
            second_step_started.set()

    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        async def on_delivery(weights: PublishedWeights) -> None:
            if weights.manifest.version == 1:
                await second_step_started.wait()

        workers.on_delivery = on_delivery

    run.learner.on_step, run.prepare = on_step, prepare
    state = await run.train()
    assert state.step == 6
    assert state.weight_syncs == 7


async def test_every_version_is_delivered_in_order(tmp_path: Path) -> None:
    run = make_run(tmp_path, max_staleness=3)
    all_workers: list[SimulatedWorkers] = []
    delivered_versions: list[int] = []

    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        async def deliver_slowly(weights: PublishedWeights) -> None:
            await asyncio.sleep(0.02)
            delivered_versions.append(weights.manifest.version)

        workers.on_delivery = deliver_slowly
        all_workers.append(workers)

    run.prepare = prepare
    await run.train()
    assert all_workers[0].max_concurrent_deliveries == 1
    assert delivered_versions == list(range(7))


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_staleness_stays_within_the_limit(tmp_path: Path, max_staleness: int) -> None:
    run = make_run(tmp_path, num_steps=12, max_staleness=max_staleness)

    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        workers.duration_s = draw_duration_s
        workers.on_delivery = lambda weights: asyncio.sleep(random.Random(1).random() / 50)

    run.prepare = prepare
    state = await run.train()
    staleness_values = [group.staleness for groups in run.batches.values() for group in groups]
    assert max(staleness_values) <= max_staleness
    assert state.max_staleness_seen == max(staleness_values)


@pytest.mark.slow
async def test_on_policy_batches_do_not_depend_on_timing(
    tmp_path: Path,
) -> None:
    """The run includes zero-variance groups and two environments."""
    batches = []
    for attempt in range(3):
        run = make_run(
            tmp_path / str(attempt),
            max_staleness=0,
            environments={"coins": {"weight": 3}, "dice": {}},
        )
        noise = random.Random(attempt)

        def prepare(workers: SimulatedWorkers, _: Controller, noise: random.Random = noise) -> None:
            workers.duration_s = lambda spec: noise.random() / 100
            workers.rewards = lambda spec: (1, 1) if spec.index % 3 == 0 else (1, -1)

        run.prepare = prepare
        await run.train()
        batches.append(
            {
                step: [(group.environment, group.index) for group in groups]
                for step, groups in run.batches.items()
            }
        )
    assert batches[0] == batches[1] == batches[2]
    environments = [name for batch in batches[0].values() for name, _ in batch]
    assert environments.count("dice") == len(environments) / 4, "the share of 'dice' is wrong"


async def test_breach_is_counted_and_the_run_continues(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)

    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        async def count_breach(weights: PublishedWeights) -> None:
            workers.num_breaches += weights.manifest.version in (2, 3)

        workers.on_delivery = count_breach

    run.prepare = prepare
    state = await run.train()
    assert (state.step, state.canary_failures) == (6, 2)
    events = [row for row in read_metrics(tmp_path / "run") if row.kind == "event"]
    assert sum(row.values.get("num_canary_failures", 0) for row in events) == 2


async def test_failed_delivery_stops_the_run_with_the_delivery_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Controller, "last_checkpoint_timeout_s", 0.05)
    run = make_run(tmp_path)

    async def on_step(step: int) -> None:
        if step == 2:
            await asyncio.Event().wait()

    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        async def fail(weights: PublishedWeights) -> None:
            await asyncio.sleep(0.01)
            if weights.manifest.version == 2:
                raise CanaryError("the worker does not sample from the published weights")

        workers.on_delivery = fail

    run.learner.on_step, run.prepare = on_step, prepare
    with pytest.raises(CanaryError):
        await run.train()


async def test_slow_publication_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Delivery, "grace_s", 0.0)
    run = make_run(tmp_path, weights={"kind": "ray", "timeout_s": 0.05})

    async def wait_forever(*_: object) -> None:
        await asyncio.Event().wait()

    run.learner.publish = wait_forever
    with pytest.raises(WeightSyncError, match=r"timeout_s = 0\.05"):
        await run.train()


async def test_groups_of_a_dead_worker_are_replayed(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=10)
    lost_indices = {5, 6, 17, 30}

    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        workers.kills_worker = lambda spec: spec.index in lost_indices

    run.prepare = prepare
    state = await run.train()
    assert state.step == 10
    assert lost_indices.isdisjoint(run.trained_indices)


@pytest.mark.slow
async def test_short_outage_of_an_environment_only_delays_the_run(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, environments={"coins": {"reconnect_timeout_s": 60}})
    num_lost = 0

    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        def draw_rewards(spec: GroupSpec) -> tuple[float | None, ...]:
            nonlocal num_lost
            num_lost += num_lost < 100
            return (1, -1) if num_lost == 100 else (None, None)

        workers.rewards = draw_rewards
        workers.duration_s = lambda spec: 0.01

    run.prepare = prepare
    state = await run.train()
    assert state.step == 6
    assert state.episodes_lost > 0
    # `games_played` also counts groups that were still in the buffer after the last step.
    assert state.games_played - state.episodes_lost >= state.games_trained == 6 * 4 * 2


@pytest.mark.slow
async def test_long_outage_of_an_environment_stops_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, environments={"coins": {"reconnect_timeout_s": 0.2}})

    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        workers.rewards = lambda spec: (None, None)
        workers.duration_s = lambda spec: 0.02

    run.prepare = prepare
    with pytest.raises(UnavailableError, match="'coins'"):
        await run.train()


async def test_waiting_times_of_both_loops_are_logged(tmp_path: Path) -> None:
    run = make_run(tmp_path, max_staleness=0, num_steps=4)

    def prepare(workers: SimulatedWorkers, controller: Controller) -> None:
        async def on_step(step: int) -> None:
            # The last group may be recorded shortly after its batch.
            await wait_until(lambda: "being played: none" in controller.sampling.describe())
            await asyncio.sleep(0.05)

        run.learner.on_step = on_step
        workers.duration_s = lambda spec: 0.03

    run.prepare = prepare
    await run.train()
    for row in run.rows[1:]:
        assert row.values["wait_for_batch_s"] >= 0.03, "training did not wait for episodes"
        assert row.values["rollout_idle_s"] >= 0.05, "sampling did not wait for training"


async def test_training_time_excludes_evaluations(tmp_path: Path) -> None:
    controllers: list[Controller] = []
    times: list[tuple[float, float]] = []

    async def evaluate(num_games: int) -> dict[str, EvalReport]:
        clock = controllers[0].components.metrics.clock
        start_s = clock.elapsed_s
        await asyncio.sleep(0.02)
        times.append((start_s, clock.elapsed_s))
        return {}

    run = make_run(tmp_path, eval={"num_games_during": 8, "every_steps": 2})
    run.evaluate = evaluate
    run.prepare = lambda workers, controller: controllers.append(controller)
    await run.train()
    assert len(times) == 3  # at steps 0, 2 and 4
    assert all(start_s == end_s for start_s, end_s in times)
    assert times[0][0] == 0 < times[1][0] < times[2][0] < run.rows[-1].elapsed_s
