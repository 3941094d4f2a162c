"""The server at which a run plays, asked before the run begins.

Forge's file names an address alone. Which game is played there, and so which fixed policies the
trained one is to be compared with, the server says.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.types import EnvironmentDescription
from ludus.proto.config.environment import RANDOM_POLICY, environment_name
from ludus.proto.errors import AuthenticationError, ConfigError, UnavailableError
from ludus.trainer.core.functions import import_object

_PACKAGE = "openspiel_env"
_POLICIES = f"{_PACKAGE}.policies:fixed_policies"
_OPTIMAL = ("basic_strategy", "follow_ball", "minimax")
"""The best policy of a game, by the name that it has there."""
_ANSWERS_WITHIN_S = 3.0
_SPEAKS_NO_GRPC = ("http", "ws")


async def with_comparisons(
    environment: dict[str, Any], game: str | None
) -> dict[str, dict[str, Any]]:
    """The environment's section by its name, the game's, with policies to compare with.

    A server that is reached over gRPC is not asked: Ray forks, which must come first.

    Args:
        game: that the configuration expects there; None expects any.

    Raises:
        ConfigError: no server answers, or it plays another game.
    """
    address = str(environment.get("address", ""))
    if not address.startswith(_SPEAKS_NO_GRPC):
        return {environment_name(environment): environment}
    description = await _described(address)
    played = description.options.get("game")
    if game is not None and played is not None and game != played:
        raise ConfigError(
            f"blackjack_env.game_name = '{game}', but '{address}' plays '{played}'; start the "
            "server of the game, or leave game_name out"
        )
    name = environment_name({"package": played or description.name})
    return {name: {**_comparisons(description), **environment}}


def _comparisons(description: EnvironmentDescription) -> dict[str, Any]:
    """Fields of an environment's section; none where no policies are known."""
    if "game" not in description.options or importlib.util.find_spec(_PACKAGE) is None:
        return {}
    names = list(import_object(_POLICIES, "environment.policies")(description.options))
    optimal = next((name for name in _OPTIMAL if name in names), None)
    return {
        "policies": _POLICIES,
        "baselines": names,
        **({"random_policy": RANDOM_POLICY, "optimal_policy": optimal} if optimal else {}),
    }


async def _described(address: str) -> EnvironmentDescription:
    try:
        async with await AsyncEnvClient.connect(
            address, ConnectOptions(connect_timeout_s=_ANSWERS_WITHIN_S)
        ) as client:
            return await client.describe()
    except (UnavailableError, AuthenticationError) as error:
        raise ConfigError(
            f"no environment answers at '{address}': {error}; start one, for example with "
            "OPENSPIEL_GAME=blackjack python -m envs.openspiel_env.server.app --port 8004"
        ) from error
