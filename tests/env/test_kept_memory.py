"""A server keeps no object that an environment returned, even without garbage collection.

A quiet server creates too little garbage to start a collection, so cycles would stay in memory.
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
from tests.env.polling import wait_until
from tests.env.served import serve, server_address

pytestmark = pytest.mark.asyncio

MAX_RESULT_BYTES = 10_000
TOO_LARGE, FAILS, FITS = 1, 2, 3


class Remembered(CountingEnv):
    """Records whether it and its results are still referenced."""

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
    """The same environment in the server's threads."""

    steps_on_event_loop = False


@pytest.fixture(params=[Remembered, RememberedInThreads])
def factory(request: pytest.FixtureRequest) -> type[Remembered]:
    return request.param


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable garbage collection, and make results of a few kilobytes too large."""
    logging.disable()  # pytest keeps captured log records with their frames
    monkeypatch.setattr(encoding, "MAX_RESULT_BYTES", MAX_RESULT_BYTES)
    Remembered.made.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("result", [TOO_LARGE, FAILS])
async def test_objects_of_an_error_are_freed_after_it_is_sent(wire: str, factory, result) -> None:
    async with (
        serve(factory) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        session, _ = await client.open()
        with pytest.raises(ExecutionError):
            await session.step({"add": result})
        *_, returned = Remembered.made
        await wait_until(lambda: returned() is None, within_s=10.0)


async def test_environment_is_freed_with_its_session(wire: str, factory) -> None:
    async with (
        serve(factory) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        for result in (FITS, FAILS, TOO_LARGE):
            session, _ = await client.open()
            await session.step({"add": FITS})
            if result != FITS:
                with pytest.raises(ExecutionError):
                    await session.step({"add": result})
            await session.close()
        await wait_until(lambda: Remembered.num_alive() == 0, within_s=10.0)
