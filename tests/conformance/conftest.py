"""Servers and clients in separate processes for the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.parties import GAME, OurServer, our_gateway, our_server


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[OurServer]:
    """Start our environment server with the game."""
    with our_server(tmp_path_factory.mktemp("server"), GAME) as running_server:
        yield running_server


@pytest.fixture(scope="module", params=["direct", "through the gateway"])
def address(request, tmp_path_factory) -> Iterator[str]:
    """Start a server, or a gateway to a server, for an upstream client."""
    folder = tmp_path_factory.mktemp("address")
    with our_server(folder, GAME) as running_server:
        if request.param == "direct":
            yield running_server.http_address
        else:
            with our_gateway(folder, running_server) as gateway_address:
                yield gateway_address
