"""An error whose class fails when it is shown still answers the call and is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.text.terminal import LogFormatter
from ludus.env.types import Transition
from ludus.proto.errors import ExecutionError
from tests.env.counting_env import CountAction, CountingEnv, CountObservation
from tests.env.served import serve


def make_error_without_module() -> Exception:
    # Python reads the name of the module from the globals, which are empty here.
    error: Exception = eval("type('Hostile', (Exception,), {})('a')", {})
    return error


def make_error_without_name() -> Exception:
    class NamelessType(type):
        @property
        def __name__(cls) -> str:
            raise RuntimeError("no name")

    return NamelessType("Hostile", (Exception,), {})("a")


def make_error_without_class() -> Exception:
    class Hostile(Exception):
        @property
        def __class__(self) -> type:
            raise RuntimeError("no class")

    return Hostile("a")


MAKE_ERRORS = [
    make_error_without_module,
    make_error_without_name,
    make_error_without_class,
]


class FailingEnv(CountingEnv):
    """A counting environment whose step with a negative number raises an error."""

    def step(self, action: CountAction) -> Transition[CountObservation]:
        if action.add < 0:
            raise MAKE_ERRORS[-action.add - 1]()
        return super().step(action)


@pytest.mark.parametrize("index", range(len(MAKE_ERRORS)))
async def test_call_is_answered(index: int) -> None:
    async with (
        serve(FailingEnv) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        session, _ = await client.open(seed=1)
        with pytest.raises(ExecutionError, match="step failed with"):
            await session.step({"add": -1 - index})
        assert (await session.step({"add": 1})).reward is not None


@pytest.mark.parametrize("make_error", MAKE_ERRORS)
def test_error_is_logged(make_error: Callable[[], Exception]) -> None:
    error = make_error()
    exc_info = (type(error), error, None)
    record = logging.LogRecord("ludus", logging.ERROR, "", 0, "it failed", (), exc_info)
    text = LogFormatter("%(levelname)s %(name)s: %(message)s").format(record)
    assert text.startswith("ERROR ludus: it failed\n    ")
