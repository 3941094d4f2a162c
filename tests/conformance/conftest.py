"""Servers and clients in separate processes for the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.parties import GAME, LudusServer, ludus_gateway, ludus_server


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LudusServer]:
    """Start our environment server with the game."""
    with ludus_server(tmp_path_factory.mktemp("server"), GAME) as running_server:
        yield running_server


@pytest.fixture(scope="module", params=["direct", "through the gateway"])
def address(request, tmp_path_factory) -> Iterator[str]:
    """Start a server, or a gateway to a server, for an upstream client."""
    folder = tmp_path_factory.mktemp("address")
    with ludus_server(folder, GAME) as running_server:
        if request.param == "direct":
            yield running_server.http_address
        else:
            with ludus_gateway(folder, running_server) as gateway_address:
                yield gateway_address
