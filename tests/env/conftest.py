"""What the tests of the SDK share."""

import pytest

from tests.env.served import WIRES


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """Each of our client's wires, for `served.address_of`."""
    return request.param
