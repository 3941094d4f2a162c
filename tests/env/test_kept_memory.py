"""A server keeps nothing of what an environment returned, also while it collects no garbage.

A quiet server makes too little garbage to collect any: whatever needs that would stay.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import ClassVar

import pytest

from ludus.env import Transition, encoding
from ludus.env.client import AsyncEnvClient
from ludus.proto.errors import ExecutionError
from tests.env.counting_env import CountAction, CountingEnv, CountObservation
from tests.env.polling import eventually
from tests.env.served import address_of, running

pytestmark = pytest.mark.asyncio

MAX_RESULT_BYTES = 10_000
TOO_LARGE, FAILS, FITS = 1, 2, 3


class Remembered(CountingEnv):
    """Knows whether it, and what it has returned, is still held by anybody."""

    made: ClassVar[list[weakref.ref[object]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(weakref.ref(self))

    @classmethod
    def num_alive(cls) -> int:
        return sum(ref() is not None for ref in cls.made)

    def step(self, action: CountAction) -> Transition[CountObservation]:
        returned = super().step(action).observation
        self.made.append(weakref.ref(returned))
        if action.add == FAILS:
            raise ValueError("after all that work")
        if action.add == TOO_LARGE:
            returned.metadata["pad"] = "x" * MAX_RESULT_BYTES
        return Transition(returned)


class RememberedInThreads(Remembered):
    """The same in the server's threads."""

    steps_on_event_loop = False


@pytest.fixture(params=[Remembered, RememberedInThreads])
def factory(request: pytest.FixtureRequest) -> type[Remembered]:
    return request.param


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No garbage is collected, and a result of a few kilobytes is too large."""
    logging.disable()  # what pytest captures it keeps, with all its frames
    monkeypatch.setattr(encoding, "MAX_RESULT_BYTES", MAX_RESULT_BYTES)
    Remembered.made.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("what", [TOO_LARGE, FAILS])
async def test_what_came_with_an_error_is_let_go_when_it_is_told(wire, factory, what):
    async with (
        running(factory) as server,
        await AsyncEnvClient.connect(address_of(server, wire)) as client,
    ):
        session, _ = await client.open()
        with pytest.raises(ExecutionError):
            await session.step({"add": what})
        *_, returned = Remembered.made
        await eventually(lambda: returned() is None, within_s=10.0)


async def test_an_environment_is_let_go_with_its_session(wire, factory):
    async with (
        running(factory) as server,
        await AsyncEnvClient.connect(address_of(server, wire)) as client,
    ):
        for what in (FITS, FAILS, TOO_LARGE):
            session, _ = await client.open()
            await session.step({"add": FITS})
            if what != FITS:
                with pytest.raises(ExecutionError):
                    await session.step({"add": what})
            await session.close()
        await eventually(lambda: Remembered.num_alive() == 0, within_s=10.0)
