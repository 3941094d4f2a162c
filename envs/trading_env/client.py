"""Client of a trading_env server.

with TradingEnv(base_url="http://localhost:8009") as env:
    observation = env.reset(seed=1).observation
    result = env.step(TradingAction(orders={observation.assets[0]: 3}))
    print(result.observation.value, result.reward)
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import TradingAction, TradingObservation, TradingState

TradingResult = TypedResult[TradingObservation]
"""Result of one reset or step."""


class TradingEnv(TypedEnv[TradingAction, TradingObservation, TradingState]):
    """A session on a trading_env server."""

    default_url = "http://localhost:8009"
    observation_type = TradingObservation
    state_type = TradingState
