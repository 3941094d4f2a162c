"""What the tests of the gateway share."""

import pytest

from tests.gateway.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
