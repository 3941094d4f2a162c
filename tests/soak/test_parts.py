"""The checks of a soak detect growth, unexplained losses and wrong results."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from tests.soak.client import Client, ClientSpec
from tests.soak.environment import EchoEnv, compute_first_digest
from tests.soak.faults import WEIGHTS, draw_faults
from tests.soak.memory import MAX_REST_MIB, compute_rise_above_median, fit_trend
from tests.soak.record import Fault, FaultRecord, Location, LostSession


def make_noisy_series(growth_per_hour: float, num_samples: int = 1200, noise: float = 0.3) -> Any:
    """Return samples of a process of 80 MiB, one per second, with a step every half minute."""
    draw = np.random.default_rng(7)
    at_s = np.arange(num_samples, dtype=float)
    steps = np.repeat(draw.normal(0.0, noise, -(-num_samples // 30)), 30)[:num_samples]
    return at_s, 80.0 + growth_per_hour * at_s / 3600 + steps


@pytest.mark.slow
@pytest.mark.parametrize("growth_per_hour", [0.0, -20.0])
def test_fluctuating_or_falling_memory_is_flat(growth_per_hour: float) -> None:
    assert fit_trend(*make_noisy_series(growth_per_hour)).is_flat


@pytest.mark.slow
def test_memory_growth_is_detected_despite_noise() -> None:
    trend = fit_trend(*make_noisy_series(20.0))
    assert not trend.is_flat
    assert trend.low < 20.0 < trend.high
    assert trend.growth == pytest.approx(20.0 / 6, rel=0.3)


@pytest.mark.slow
def test_single_increase_at_the_start_is_not_growth() -> None:
    at_s, values = make_noisy_series(0.0)
    assert fit_trend(at_s, values - 40.0 * (at_s < 300)).is_flat


@pytest.mark.slow
def test_single_step_is_flat_but_repeated_steps_are_not() -> None:
    at_s = np.arange(1200, dtype=float)
    steps = 80.0 + 0.9 * (at_s > 900)
    assert fit_trend(at_s, steps, step=1.0).is_flat
    for later_s in range(650, 1200, 100):
        steps = steps + 0.9 * (at_s > later_s)
    assert not fit_trend(at_s, steps, step=1.0).is_flat


def test_memory_held_at_the_end_is_detected_but_freed_memory_is_not() -> None:
    at_s, values = make_noisy_series(0.0)
    assert compute_rise_above_median(values + 190.0 * (at_s > 1100)) > MAX_REST_MIB
    freed_values = values + 190.0 * ((at_s > 1000) & (at_s < 1100))
    assert compute_rise_above_median(freed_values) < MAX_REST_MIB


def make_lost_session(last_success_s: float, failed_s: float, **location: Any) -> LostSession:
    """Return a session on worker 7 of a server that was lost between the two times."""
    fields = {"server": "pool-kept", "worker": 7, "client": "grpc-kept", **location}
    return LostSession("one", Location(**fields), last_success_s, failed_s, "SESSION_LOST", "")


def make_worker_kill(at_s: float) -> Fault:
    """Return the kill of worker 7."""
    affected_locations = (Location(server="pool-kept", worker=7),)
    return Fault(0, "worker killed", "pool-kept 7", at_s, at_s, affected_locations)


@pytest.mark.parametrize(
    ("session", "is_explained"),
    [
        (make_lost_session(99.0, 101.0), True),
        (make_lost_session(99.0, 101.0, worker=8), False),
        (make_lost_session(99.0, 101.0, server="pool-2"), False),
        (make_lost_session(10.0, 12.0), False),
        (make_lost_session(150.0, 151.0), False),
    ],
    ids=["same worker", "other worker", "other server", "earlier", "later"],
)
def test_fault_explains_only_losses_at_the_same_location_and_time(
    session: LostSession, is_explained: bool
) -> None:
    record = FaultRecord(faults=[make_worker_kill(100.0)], lost=[session])
    assert (record.find_unexplained_losses() == []) == is_explained


def test_pause_fault_does_not_explain_a_lost_session() -> None:
    paused = Fault(0, "process paused", "pool-kept", 99.0, 105.0)
    record = FaultRecord(faults=[paused], lost=[make_lost_session(100.0, 104.0)])
    assert record.find_unexplained_losses() == record.lost


class _LocalOpener:
    """Opens sessions in this process and changes their results by `tamper`."""

    def __init__(self, tamper: Any) -> None:
        self._tamper = tamper
        self.last: dict[str, Any] = {}

    async def open(self, seed: int, player: str, num_steps: int) -> _LocalOpener:
        self._environment = EchoEnv()
        transition = self._environment.reset(seed=seed, player=player, num_steps=num_steps)
        self.first = self.last = transition.observation.model_dump()
        return self

    async def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        transition = self._environment.step(EchoEnv.action_type(**action))
        previous, self.last = self.last, transition.observation.model_dump()
        return self._tamper(self._environment, previous, self.last), transition.terminated

    async def state(self) -> dict[str, Any]:
        return self._environment.state.model_dump()

    async def close(self) -> None:
        pass


def take_step_twice(environment: EchoEnv, previous: Any, current: Any) -> Any:
    """Return the result of the same step again."""
    return environment.step(EchoEnv.action_type(payload="second")).observation.model_dump()


TAMPERING = {
    "correct result": lambda environment, previous, current: current,
    "previous result": lambda environment, previous, current: previous,
    "result of another session": lambda environment, previous, current: (
        current | {"player": "other"}
    ),
    "result of another payload": lambda environment, previous, current: (
        current | {"digest": compute_first_digest(1, "x")}
    ),
    "step taken twice": take_step_twice,
}


@pytest.mark.parametrize("name", TAMPERING)
async def test_client_reports_a_violation_only_for_a_wrong_result(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ClientSpec("c", "grpc", "", "t", "", 1, {}, {}, {"inline": (3, 3)}, pace_s=0.0001)
    client = Client(spec)
    client._is_playing.set()
    session = await client._open("inline", _LocalOpener(TAMPERING[name]), "c/1")
    assert session is not None
    async with asyncio.timeout(60):
        await client._play_session(session, "inline")
    assert ("violation" in capsys.readouterr().out) == (name != "correct result")
    assert client._counts["came to their end"] == (name == "correct result")


def test_seed_determines_the_faults_and_their_details() -> None:
    def take_first(seed: int) -> list[tuple[str, float]]:
        return [(kind, draw.random()) for kind, draw in itertools.islice(draw_faults(seed), 50)]

    assert take_first(1) == take_first(1)
    assert take_first(1) != take_first(2)
    assert {kind for kind, _ in itertools.islice(draw_faults(1), 3000)} == set(WEIGHTS)
