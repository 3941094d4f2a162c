"""A server frees the objects that an environment returned, even without garbage collection.

An idle server creates too little garbage to trigger a collection, so reference cycles would stay in
memory.
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
TOO_LARGE_RESULT, STEP_ERROR, NORMAL_RESULT = 1, 2, 3


class ReferenceRecordingEnv(CountingEnv):
    """An environment that records weak references to all instances and their results."""

    references: ClassVar[list[weakref.ref[object]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.references.append(weakref.ref(self))

    @classmethod
    def count_live_objects(cls) -> int:
        return sum(ref() is not None for ref in cls.references)

    def step(self, action: CountAction) -> Transition[CountObservation]:
        observation = super().step(action).observation
        self.references.append(weakref.ref(observation))
        if action.add == STEP_ERROR:
            raise ValueError("the step failed")
        if action.add == TOO_LARGE_RESULT:
            observation.metadata["pad"] = "x" * MAX_RESULT_BYTES
        return Transition(observation)


class ThreadedReferenceRecordingEnv(ReferenceRecordingEnv):
    """A `ReferenceRecordingEnv` that steps in the server's threads."""

    steps_on_event_loop = False


@pytest.fixture(params=[ReferenceRecordingEnv, ThreadedReferenceRecordingEnv])
def factory(request: pytest.FixtureRequest) -> type[ReferenceRecordingEnv]:
    return request.param


@pytest.fixture(autouse=True)
def disable_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable garbage collection, and lower the size limit of results."""
    logging.disable()  # pytest keeps captured log records with their frames
    monkeypatch.setattr(encoding, "MAX_RESULT_BYTES", MAX_RESULT_BYTES)
    ReferenceRecordingEnv.references.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("result_kind", [TOO_LARGE_RESULT, STEP_ERROR])
async def test_error_objects_are_freed_after_the_error_is_sent(
    wire: str, factory, result_kind
) -> None:
    async with (
        serve(factory) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        session, _ = await client.open()
        with pytest.raises(ExecutionError):
            await session.step({"add": result_kind})
        *_, last_reference = ReferenceRecordingEnv.references
        await wait_until(lambda: last_reference() is None, within_s=10.0)


async def test_environment_is_freed_when_the_session_closes(wire: str, factory) -> None:
    async with (
        serve(factory) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        for result_kind in (NORMAL_RESULT, STEP_ERROR, TOO_LARGE_RESULT):
            session, _ = await client.open()
            await session.step({"add": NORMAL_RESULT})
            if result_kind != NORMAL_RESULT:
                with pytest.raises(ExecutionError):
                    await session.step({"add": result_kind})
            await session.close()
        await wait_until(lambda: ReferenceRecordingEnv.count_live_objects() == 0, within_s=10.0)
