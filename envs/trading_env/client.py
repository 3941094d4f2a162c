"""The client of a server of markets.

with TradingEnv(base_url="http://localhost:8009") as env:
    observation = env.reset(seed=1).observation
    result = env.step(TradingAction(orders={observation.assets[0]: 3}))
    print(result.observation.value, result.reward)
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import TradingAction, TradingObservation, TradingState

TradingResult = TypedResult[TradingObservation]
"""What one reset or step led to."""


class TradingEnv(TypedEnv[TradingAction, TradingObservation, TradingState]):
    """A market of a server."""

    default_url = "http://localhost:8009"
    observation_type = TradingObservation
    state_type = TradingState
