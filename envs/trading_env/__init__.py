"""Trading on simulated or recorded prices.

`make_environment` builds an environment in this process; `TradingEnv` connects to a server.
"""

from __future__ import annotations

from typing import Any

from .client import TradingEnv, TradingResult
from .models import TradingAction, TradingObservation, TradingState
from .server.trading_environment import TradingEnvironment

__all__ = [
    "DEFAULT_PORT",
    "TradingAction",
    "TradingEnv",
    "TradingEnvironment",
    "TradingObservation",
    "TradingResult",
    "TradingState",
    "make_environment",
]

DEFAULT_PORT = 8009


def make_environment(**options: Any) -> TradingEnvironment:
    """Return a new environment. The options are the fields of `TradingOptions`.

    Raises:
        ConfigError: An option or the price file is invalid.
    """
    return TradingEnvironment(**options)
