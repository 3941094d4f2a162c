"""Our client plays on OpenEnv's own servers, and sees what their own clients see."""

import pytest
from parties import NUM_GAMES, SERVERS, play_with_our_client, play_with_stock_client, stock_server

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]


@pytest.mark.parametrize("version", SERVERS)
def test_our_client_sees_what_the_servers_own_client_sees(version):
    # Servers of 0.1.x take no seeds: each process deals from the first one again.
    seeded = version != "0.1.1"
    with stock_server(version) as address:
        theirs = play_with_stock_client(version, address)
    with stock_server(version) as address:
        ours = play_with_our_client(address, seeded=seeded)
    assert len(ours) == NUM_GAMES
    assert ours == theirs
