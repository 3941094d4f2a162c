"""An environment in which a player trades and tries to beat buy-and-hold."""

from __future__ import annotations

import math
import random
import secrets
from typing import Any

from ludus.env import Environment, Transition
from ludus.env.types import JsonObject, TaskSet
from ludus.proto.errors import EpisodeStateError, ErrorCode, IllegalActionError

from ..market.file import read_prices
from ..market.prices import Prices
from ..market.simulation import simulate
from ..models import TradingAction, TradingObservation, TradingState
from ..options import TradingOptions
from ..portfolio import Portfolio, buy_equally
from ..text import TradingRenderer
from .windows import Windows

_TOLERANCE = 1e-9
"""Allowance for rounding when values are compared, as a share of the value."""


class TradingEnvironment(Environment[TradingAction, TradingObservation, TradingState]):
    """A market in which orders for whole shares are filled at the last price.

    The reward of a step is the log return ln(V' / V) of the portfolio: V is its value before the
    orders and V' its value at the next price. The return of an episode is ln(V_end / V_start). The
    episode is a success if V_end is above the value of buy-and-hold, which spends an equal part
    of the cash on each asset at the start.

    Args:
        options: The fields of `TradingOptions`.

    Raises:
        NotFoundError: The price file or a column does not exist.
        ConfigError: An option is invalid or does not fit the file.
    """

    action_type = TradingAction
    observation_type = TradingObservation
    state_type = TradingState
    name = "trading_env"
    description = "Trading on simulated or recorded prices"
    needs_network = False
    steps_on_event_loop = True

    def __init__(self, **options: Any) -> None:
        self._options = TradingOptions.parse(options)
        self._recorded_prices: Prices | None = None
        self._windows: Windows | None = None
        if self._options.path:
            self._recorded_prices = read_prices(
                self._options.path, self._options.columns, self._options.asset_column
            )
            self._windows = Windows(
                len(self._recorded_prices.rows), self._num_rows, self._options.test_share
            )
        self._prices = Prices((), (), ())
        self._portfolio = Portfolio(self._options.cash, ())
        self._state = TradingState(market=self._market_name)
        self._is_playing = False
        self.text_renderer = TradingRenderer(self._options.text_style, self._options.has_quantities)

    @property
    def options(self) -> JsonObject:
        """The options that the environment was built with."""
        return self._options.to_json()

    @property
    def tasks(self) -> TaskSet | None:
        """The windows of a file. None for a simulation, where every seed is a new market."""
        if self._windows is None:
            return None
        return TaskSet(self._windows.num_train, self._windows.num_test)

    @property
    def state(self) -> TradingState:
        """The state of the current episode."""
        return self._state

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[TradingObservation]:
        """Start an episode in the market of the seed, with cash and no shares."""
        self._prices = self._draw_prices(secrets.randbits(31) if seed is None else seed)
        cash = self._options.cash
        self._portfolio = Portfolio(cash, (0,) * len(self._prices.assets))
        buy_and_hold = buy_equally(cash, self._find_fill_prices(0), self._options.cost)
        self._state = TradingState(
            episode_id=episode_id,
            market=self._market_name,
            value=cash,
            hold_value=buy_and_hold.compute_value(self._find_fill_prices(self._options.num_steps)),
        )
        self._is_playing = True
        return Transition(self._observe())

    def step(self, action: TradingAction) -> Transition[TradingObservation]:
        """Fill the orders at the last prices, then show the next prices.

        Raises:
            IllegalActionError: An order cannot be filled. None of the orders was filled.
            EpisodeStateError: There is no episode, or it is over.
        """
        if not self._is_playing:
            raise EpisodeStateError(
                "orders need a running episode; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        old_value = self._state.value
        self._portfolio = self._fill_orders(action)
        self._state.step_count += 1
        self._state.value = self._portfolio.compute_value(
            self._find_fill_prices(self._state.step_count)
        )
        self._is_playing = self._state.step_count < self._options.num_steps
        reward = math.log(self._state.value / old_value)
        if self._is_playing:
            return Transition(self._observe(), reward)
        success = self._state.value > self._state.hold_value * (1 + _TOLERANCE)
        return Transition(self._observe(), reward, terminated=True, success=success)

    @property
    def _market_name(self) -> str:
        return self._options.path or self._options.market

    @property
    def _num_rows(self) -> int:
        """Number of price rows in an episode: the first observation, and one row per decision."""
        return self._options.window + self._options.num_steps

    def _draw_prices(self, seed: int) -> Prices:
        if self._recorded_prices is not None and self._windows is not None:
            return self._recorded_prices.take_window(
                self._windows.find_start_row(seed), self._num_rows
            )
        options = self._options
        return simulate(
            options.market,
            # The text separates these numbers from those of a player with random.Random(seed).
            random.Random(f"trading_env {seed}"),
            self._num_rows,
            options.num_assets,
            volatility=options.volatility,
            drift=options.drift,
            pull=options.pull,
        )

    def _find_fill_prices(self, num_steps: int) -> tuple[float, ...]:
        """Return the prices at which orders are filled after `num_steps` decisions."""
        return self._prices.rows[self._options.window - 1 + num_steps]

    def _fill_orders(self, action: TradingAction) -> Portfolio:
        assets = self._prices.assets
        unknown_assets = sorted(set(action.orders) - set(assets))
        if unknown_assets:
            raise IllegalActionError(
                f"there is no asset {unknown_assets[0]!r}; order {', '.join(assets)}"
            )
        orders = {assets.index(name): num_shares for name, num_shares in action.orders.items()}
        try:
            prices = self._find_fill_prices(self._state.step_count)
            return self._portfolio.fill(orders, prices, self._options.cost)
        except (ValueError, OverflowError) as error:
            raise IllegalActionError(
                f"the orders {str(action.orders)[:200]} cannot be filled: {error}"
            ) from None

    def _observe(self) -> TradingObservation:
        step, window = self._state.step_count, self._options.window
        visible_prices = self._prices.take_window(step, window)
        return TradingObservation(
            assets=list(visible_prices.assets),
            prices=[list(row) for row in visible_prices.rows],
            date=visible_prices.dates[-1],
            cash=self._portfolio.cash,
            shares=list(self._portfolio.shares),
            value=self._state.value,
            cost=self._options.cost,
            steps_left=self._options.num_steps - step,
        )
