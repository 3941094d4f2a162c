"""Trading: `make_environment` to play here, `TradingEnv` anywhere."""

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
    """A new environment; the options are those of `TradingEnvironment`.

    Raises:
        ConfigError: the options or the file of prices do not fit.
    """
    return TradingEnvironment(**options)
