"""Makes the fake environment importable, whatever pytest's import mode; and what tests share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from served import WIRES


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """Each of our client's wires, for `served.address_of`."""
    return request.param
