"""Makes the servers for tests importable, whatever pytest's import mode; and what tests share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
