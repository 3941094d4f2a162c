"""The checks of a soak detect growth, unexplained losses and wrong results."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from tests.soak.book import Book, Fault, Location, LostSession
from tests.soak.client import Client, ClientSpec
from tests.soak.environment import EchoEnv, first_digest
from tests.soak.faults import WEIGHTS, draw_faults
from tests.soak.memory import AT_REST_MIB, above_median, fit_trend


def noisy(growth_per_hour: float, num_samples: int = 1200, noise: float = 0.3) -> Any:
    """Samples of an 80 MiB process, one per second, with steps every half minute."""
    draw = np.random.default_rng(7)
    at_s = np.arange(num_samples, dtype=float)
    steps = np.repeat(draw.normal(0.0, noise, -(-num_samples // 30)), 30)[:num_samples]
    return at_s, 80.0 + growth_per_hour * at_s / 3600 + steps


@pytest.mark.parametrize("growth_per_hour", [0.0, -20.0])
def test_fluctuating_or_falling_memory_is_flat(growth_per_hour: float) -> None:
    assert fit_trend(*noisy(growth_per_hour)).is_flat


def test_memory_growth_is_detected_despite_noise() -> None:
    trend = fit_trend(*noisy(20.0))
    assert not trend.is_flat
    assert trend.low < 20.0 < trend.high
    assert trend.growth == pytest.approx(20.0 / 6, rel=0.3)


def test_single_increase_at_the_start_is_not_growth() -> None:
    at_s, values = noisy(0.0)
    assert fit_trend(at_s, values - 40.0 * (at_s < 300)).is_flat


def test_single_step_is_flat_but_repeated_steps_are_not() -> None:
    at_s = np.arange(1200, dtype=float)
    steps = 80.0 + 0.9 * (at_s > 900)
    assert fit_trend(at_s, steps, step=1.0).is_flat
    for later_s in range(650, 1200, 100):
        steps = steps + 0.9 * (at_s > later_s)
    assert not fit_trend(at_s, steps, step=1.0).is_flat


def test_memory_held_at_the_end_is_detected_but_freed_memory_is_not() -> None:
    at_s, values = noisy(0.0)
    assert above_median(values + 190.0 * (at_s > 1100)) > AT_REST_MIB
    let_go = values + 190.0 * ((at_s > 1000) & (at_s < 1100))
    assert above_median(let_go) < AT_REST_MIB


def lost(alive_s: float, failed_s: float, **location: Any) -> LostSession:
    """A session on worker 7 of a server that was lost between the two times."""
    fields = {"server": "pool-kept", "worker": 7, "client": "grpc-kept", **location}
    return LostSession("one", Location(**fields), alive_s, failed_s, "SESSION_LOST", "")


def worker_killed(at_s: float) -> Fault:
    """The kill of that worker."""
    hits = (Location(server="pool-kept", worker=7),)
    return Fault(0, "worker killed", "pool-kept 7", at_s, at_s, hits)


@pytest.mark.parametrize(
    ("session", "is_explained"),
    [
        (lost(99.0, 101.0), True),
        (lost(99.0, 101.0, worker=8), False),
        (lost(99.0, 101.0, server="pool-2"), False),
        (lost(10.0, 12.0), False),
        (lost(150.0, 151.0), False),
    ],
    ids=["hit", "beside it", "elsewhere", "before", "after"],
)
def test_fault_explains_only_losses_at_the_same_location_and_time(
    session: LostSession, is_explained: bool
) -> None:
    book = Book(faults=[worker_killed(100.0)], lost=[session])
    assert (book.unexplained_losses() == []) == is_explained


def test_pause_fault_does_not_explain_a_lost_session() -> None:
    paused = Fault(0, "process paused", "pool-kept", 99.0, 105.0)
    book = Book(faults=[paused], lost=[lost(100.0, 104.0)])
    assert book.unexplained_losses() == book.lost


class _Sessions:
    """An opener of one environment in this process, whose results a test may change."""

    def __init__(self, tamper: Any) -> None:
        self._tamper = tamper
        self.last: dict[str, Any] = {}

    async def open(self, seed: int, player: str, num_steps: int) -> _Sessions:
        self._environment = EchoEnv()
        transition = self._environment.reset(seed=seed, player=player, num_steps=num_steps)
        self.first = self.last = transition.observation.model_dump()
        return self

    async def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        transition = self._environment.step(EchoEnv.action_type(**action))
        earlier, self.last = self.last, transition.observation.model_dump()
        return self._tamper(self._environment, earlier, self.last), transition.terminated

    async def state(self) -> dict[str, Any]:
        return self._environment.state.model_dump()

    async def close(self) -> None:
        pass


def taken_twice(environment: EchoEnv, earlier: Any, now: Any) -> Any:
    """Return the result of the same step again."""
    return environment.step(EchoEnv.action_type(payload="again")).observation.model_dump()


TAMPERING = {
    "the right answer": lambda environment, earlier, now: now,
    "the answer before": lambda environment, earlier, now: earlier,
    "another session's": lambda environment, earlier, now: now | {"player": "other"},
    "another payload's": lambda environment, earlier, now: now | {"digest": first_digest(1, "x")},
    "a step taken twice": taken_twice,
}


@pytest.mark.parametrize("name", TAMPERING)
async def test_client_reports_a_violation_only_for_a_wrong_result(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ClientSpec("c", "grpc", "", "t", "", 1, {}, {}, {"inline": (3, 3)}, pace_s=0.0001)
    client = Client(spec)
    client._is_playing.set()
    life = await client._open("inline", _Sessions(TAMPERING[name]), "c/1")
    assert life is not None
    async with asyncio.timeout(60):
        await client._live(life, "inline")
    assert ("violation" in capsys.readouterr().out) == (name != "the right answer")
    assert client._counts["came to their end"] == (name == "the right answer")


def test_seed_determines_the_faults_and_their_details() -> None:
    def take_first(seed: int) -> list[tuple[str, float]]:
        return [(kind, draw.random()) for kind, draw in itertools.islice(draw_faults(seed), 50)]

    assert take_first(1) == take_first(1)
    assert take_first(1) != take_first(2)
    assert {kind for kind, _ in itertools.islice(draw_faults(1), 3000)} == set(WEIGHTS)
