"""Fixtures of the SDK's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.env.counting_env import Gate
from tests.env.polling import CoreClock
from tests.env.served import WIRES


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """Return each wire of the client, for `served.server_address`."""
    return request.param


@pytest.fixture
def core_clock(monkeypatch: pytest.MonkeyPatch) -> CoreClock:
    """Return a clock that a test advances instead of waiting for a session to become idle."""
    return CoreClock(monkeypatch)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Yield a closed gate, which is opened at the latest after the test."""
    folder = tmp_path / "gate"
    folder.mkdir()
    gate = Gate(folder)
    yield gate
    gate.open()
