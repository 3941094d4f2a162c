"""Queries of the environment server before a run starts.

Forge's file contains only an address. The server reports its game, from which the baselines of the
run follow.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.types import EnvironmentDescription
from ludus.proto.config.environment import RANDOM_POLICY, make_environment_name
from ludus.proto.errors import AuthenticationError, ConfigError, UnavailableError
from ludus.trainer.core.functions import import_callable

_GAMES_PACKAGE = "openspiel_env"
_POLICIES_PATH = f"{_GAMES_PACKAGE}.policies:fixed_policies"
_OPTIMAL_POLICIES = ("basic_strategy", "follow_ball", "minimax")
"""Names of optimal policies, one per game."""
_CONNECT_TIMEOUT_S = 3.0
_HTTP_SCHEMES = ("http", "ws")


async def add_baselines(environment: dict[str, Any], game: str | None) -> dict[str, dict[str, Any]]:
    """Add baselines to an environment's section, and return it by the name of its game.

    A server with a gRPC address is not queried, because Ray must fork before this process uses
    gRPC.

    Args:
        game: the game in the configuration; None accepts any game.
    """
    address = str(environment.get("address", ""))
    if not address.startswith(_HTTP_SCHEMES):
        return {make_environment_name(environment): environment}
    description = await _describe_environment(address)
    served_game = description.options.get("game")
    if game is not None and served_game is not None and game != served_game:
        raise ConfigError(
            f"blackjack_env.game_name = '{game}', but '{address}' serves '{served_game}'; start a "
            "server of the game, or remove game_name"
        )
    name = make_environment_name({"package": served_game or description.name})
    return {name: {**_make_baseline_fields(description), **environment}}


def _make_baseline_fields(description: EnvironmentDescription) -> dict[str, Any]:
    """Return the fields with baselines, or no fields if the game has no known policies."""
    if "game" not in description.options or importlib.util.find_spec(_GAMES_PACKAGE) is None:
        return {}
    make_policies = import_callable(_POLICIES_PATH, "environment.policies")
    names = list(make_policies(description.options))
    fields: dict[str, Any] = {"policies": _POLICIES_PATH, "baselines": names}
    optimal_policy = next((name for name in _OPTIMAL_POLICIES if name in names), None)
    if optimal_policy:
        fields |= {"random_policy": RANDOM_POLICY, "optimal_policy": optimal_policy}
    return fields


async def _describe_environment(address: str) -> EnvironmentDescription:
    try:
        async with await AsyncEnvClient.connect(
            address, ConnectOptions(connect_timeout_s=_CONNECT_TIMEOUT_S)
        ) as client:
            return await client.describe()
    except (UnavailableError, AuthenticationError) as error:
        raise ConfigError(
            f"no environment responds at '{address}': {error}; start one, for example with "
            "OPENSPIEL_GAME=blackjack python -m envs.openspiel_env.server.app --port 8004"
        ) from error
