"""Options of the trading environment."""

from __future__ import annotations

from pydantic import Field

from ludus.env.options import EnvironmentOptions

from .market.simulation import MarketKind
from .text import TextStyle


class TradingOptions(EnvironmentOptions):
    """A market and its rules."""

    market: MarketKind = "reverting"
    """Simulated prices. `walk` is geometric Brownian motion; `regimes` changes the sign of its
    drift with probability 0.1 per step; `reverting` returns to 100."""
    path: str = ""
    """CSV or Parquet file of prices to use instead of a simulation. Parquet needs `pip install
    pyarrow`."""
    columns: tuple[str, ...] = Field((), strict=False)
    """Price columns of the file; each is an asset. If empty: `close`, or all columns except
    `date`."""
    asset_column: str = ""
    """Column with the name of the asset, if each row has the price of one asset. Files made for
    FinRL use `tic`."""
    test_share: float = Field(0.2, ge=0, le=0.9)
    """Share of the file, at its end, that only evaluation uses (seeds from 2^31). Training windows
    end before it."""
    num_assets: int = Field(1, ge=1, le=26)
    """Number of simulated assets."""
    volatility: float = Field(0.05, ge=0, le=1)
    """Volatility of the simulation per step. `market/simulation.py` has the formulas."""
    drift: float = Field(0.01, ge=-1, le=1)
    """Drift of the simulation per step."""
    pull: float = Field(0.3, ge=1e-6, le=1)
    """Pull of the simulation toward the mean per step."""
    num_steps: int = Field(16, ge=1, le=100_000)
    """Number of decisions in an episode."""
    window: int = Field(4, ge=1, le=10_000)
    """Number of prices in an observation."""
    cash: float = Field(1000.0, ge=1e-3, le=1e15)
    """Cash at the start."""
    cost: float = Field(0.001, ge=0, le=0.5)
    """Cost of an order, as a share of its value."""
    text_style: TextStyle = "compact"
    """`compact` shows numbers only; `rules` explains the market."""
    has_quantities: bool = True
    """Offer language models orders of several sizes. Otherwise only `buy`, `sell` and `hold`."""
