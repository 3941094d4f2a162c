"""Fixtures that start servers in separate processes for the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.parties import GAME, LudusServer, start_ludus_gateway, start_ludus_server


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LudusServer]:
    """Start a Ludus server of the game."""
    with start_ludus_server(tmp_path_factory.mktemp("server"), GAME) as running_server:
        yield running_server


@pytest.fixture(scope="module", params=["direct", "through the gateway"])
def address(request, tmp_path_factory) -> Iterator[str]:
    """Start a Ludus server and yield its address, or the address of a gateway to it."""
    folder = tmp_path_factory.mktemp("address")
    with start_ludus_server(folder, GAME) as running_server:
        if request.param == "direct":
            yield running_server.http_address
        else:
            with start_ludus_gateway(folder, running_server) as gateway_address:
                yield gateway_address
