"""What the tests of the SDK share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.env.counting_env import Gate
from tests.env.polling import CoreClock
from tests.env.served import WIRES


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """Each of our client's wires, for `served.server_address`."""
    return request.param


@pytest.fixture
def core_clock(monkeypatch: pytest.MonkeyPatch) -> CoreClock:
    """What a test moves on instead of waiting for a session to be idle for long enough."""
    return CoreClock(monkeypatch)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Closed until the test opens it; no step is held beyond the test."""
    folder = tmp_path / "gate"
    folder.mkdir()
    gate = Gate(folder)
    yield gate
    gate.open()
