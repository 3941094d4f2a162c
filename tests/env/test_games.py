"""Environments declare whether they are games, over every wire."""

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.sessions.hosts import describe_environment
from ludus.env.targets.targets import environment_factory
from tests.env.counting_env import CountingEnv
from tests.env.served import WIRES, serve, server_address


class CountingGame(CountingEnv):
    """A counting environment whose episodes are won."""

    is_game = True


@pytest.mark.asyncio
@pytest.mark.parametrize("wire", WIRES)
async def test_clients_read_whether_an_environment_is_a_game(wire: str) -> None:
    for factory, is_game in ((CountingGame, True), (CountingEnv, False)):
        async with (
            serve(factory) as server,
            await AsyncEnvClient.connect(server_address(server, wire)) as client,
        ):
            assert (await client.describe()).is_game is is_game


@pytest.mark.parametrize(
    ("target", "options", "is_game"),
    [
        ("openspiel_env", {"game": "blackjack"}, True),
        ("uno_env", {}, True),
        ("gymnasium:Blackjack-v1", {}, True),
        ("gymnasium:FrozenLake-v1", {}, False),
        ("math_env", {}, False),
        ("coding_env", {}, False),
        ("trading_env", {}, False),
    ],
)
def test_packages_declare_games(target: str, options: dict[str, str], is_game: bool) -> None:
    environment = environment_factory(target, options)()
    try:
        assert describe_environment(environment).is_game is is_game
    finally:
        environment.close()
