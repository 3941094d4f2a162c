"""Fixtures of the gateway tests."""

import pytest

from tests.gateway.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
