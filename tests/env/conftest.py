"""Fixtures for the tests of the environment SDK."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.env.counting_env import Gate
from tests.env.polling import CoreClock
from tests.env.served import WIRES


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """Return the name of a wire. Each test runs once per wire."""
    return request.param


@pytest.fixture
def core_clock(monkeypatch: pytest.MonkeyPatch) -> CoreClock:
    """Return a clock that a test advances instead of waiting for a session to become idle."""
    return CoreClock(monkeypatch)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Yield a closed gate, and open it after the test so that no step keeps waiting."""
    folder = tmp_path / "gate"
    folder.mkdir()
    gate = Gate(folder)
    yield gate
    gate.open()
