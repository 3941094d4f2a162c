"""A market for some decisions: what is owned at the end, against who buys and keeps."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence
from typing import get_args

from ludus.env import Environment, Transition
from ludus.env.types import JsonObject, TaskSet
from ludus.proto.errors import (
    ConfigError,
    EpisodeStateError,
    ErrorCode,
    IllegalActionError,
)

from ..market.file import read_prices
from ..market.prices import Prices
from ..market.simulation import Kind, simulate
from ..models import TradingAction, TradingObservation, TradingState
from ..portfolio import Portfolio, bought_equally
from ..text import TextStyle, TradingRenderer
from .windows import Windows

_TOLERANCE = 1e-9
"""What the rewards of an episode may lose in being added up."""


class TradingEnvironment(Environment[TradingAction, TradingObservation, TradingState]):
    """Orders for whole shares at the last price; the reward is the log return of what is owned.

    r = ln(V' / V), V the value before the orders and V' after the next price; so the return of an
    episode is ln(V_end / V_start). It succeeds where that is above the return of who spends equal
    parts of the cash on all assets at the beginning.

    Args:
        market: how prices are simulated, "walk", "regimes" or "reverting".
        path: a file of prices, CSV or Parquet, which are played on instead.
        columns: those of the file that hold prices; none are `close`, or all but the date.
        asset_column: the one that names the asset, where a row holds one.
        test_share: the last part of the file, which only seeds from 2**31 on show.
        num_assets: of a simulation.
        volatility: of a step of the simulation; `drift`, and the `pull` to the mean likewise.
        num_steps: decisions of an episode.
        window: prices that are shown.
        cash: at the beginning.
        cost: share of an order's worth that is paid for it.
        text_style: "compact" shows the bare numbers; "rules" explains.
        has_quantities: offers orders of some sizes to language models, not only all or nothing.

    Raises:
        NotFoundError: there is no such file or column.
        ConfigError: the options or the file do not fit.
    """

    action_type = TradingAction
    observation_type = TradingObservation
    state_type = TradingState
    name = "trading_env"
    description = "Trading on simulated or recorded prices"
    steps_on_event_loop = True

    def __init__(
        self,
        market: Kind = "reverting",
        *,
        path: str = "",
        columns: Sequence[str] = (),
        asset_column: str = "",
        test_share: float = 0.2,
        num_assets: int = 1,
        volatility: float = 0.05,
        drift: float = 0.01,
        pull: float = 0.3,
        num_steps: int = 16,
        window: int = 4,
        cash: float = 1000.0,
        cost: float = 0.001,
        text_style: TextStyle = "compact",
        has_quantities: bool = True,
    ) -> None:
        self._options: JsonObject = {
            "market": market,
            "path": path,
            "columns": list(columns),
            "asset_column": asset_column,
            "test_share": test_share,
            "num_assets": num_assets,
            "volatility": volatility,
            "drift": drift,
            "pull": pull,
            "num_steps": num_steps,
            "window": window,
            "cash": cash,
            "cost": cost,
            "text_style": text_style,
            "has_quantities": has_quantities,
        }
        _check(self._options)
        self._market: Kind = market
        self._recorded: Prices | None = None
        self._windows: Windows | None = None
        if path:
            self._recorded = read_prices(path, tuple(columns), asset_column)
            num_rows = len(self._recorded.rows)
            self._windows = Windows(num_rows, self._num_rows, test_share)
        self._prices = Prices((), (), ())
        self._portfolio = Portfolio(cash, ())
        self._state = TradingState(market=path or market)
        self._is_playing = False
        self.text_renderer = TradingRenderer(text_style, has_quantities)

    @property
    def options(self) -> JsonObject:
        """What it was built with."""
        return dict(self._options)

    @property
    def tasks(self) -> TaskSet | None:
        """The windows of a file; None of a simulation, where every seed is another market."""
        if self._windows is None:
            return None
        return TaskSet(self._windows.num_train, self._windows.num_test)

    @property
    def state(self) -> TradingState:
        """Where the episode stands."""
        return self._state

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[TradingObservation]:
        """A market, which follows from the seed, and all in cash."""
        seed = secrets.randbits(31) if seed is None else seed
        self._prices = self._drawn(seed)
        cash = self._options["cash"]
        self._portfolio = Portfolio(cash, (0,) * len(self._prices.assets))
        held = bought_equally(cash, self._now(0), self._options["cost"])
        self._state = TradingState(
            episode_id=episode_id,
            market=self._options["path"] or self._market,
            value=cash,
            hold_value=held.value(self._now(self._options["num_steps"])),
        )
        self._is_playing = True
        return Transition(self._shown())

    def step(self, action: TradingAction) -> Transition[TradingObservation]:
        """The next prices, after the orders were filled at the last ones.

        Raises:
            IllegalActionError: an order cannot be filled; none of them was.
            EpisodeStateError: there is no episode, or it is over.
        """
        if not self._is_playing:
            raise EpisodeStateError(
                "expected a running episode, got orders before or after one; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        before = self._state.value
        self._portfolio = self._filled(action)
        self._state.step_count += 1
        self._state.value = self._portfolio.value(self._now(self._state.step_count))
        self._is_playing = self._state.step_count < self._options["num_steps"]
        reward = math.log(self._state.value / before)
        if self._is_playing:
            return Transition(self._shown(), reward)
        success = self._state.value > self._state.hold_value * (1 + _TOLERANCE)
        return Transition(self._shown(), reward, terminated=True, success=success)

    @property
    def _num_rows(self) -> int:
        """Of an episode: those shown at first, and one after each decision."""
        return self._options["window"] + self._options["num_steps"]

    def _drawn(self, seed: int) -> Prices:
        if self._recorded is not None and self._windows is not None:
            return self._recorded.window(self._windows.start_of(seed), self._num_rows)
        options = self._options
        return simulate(
            self._market,
            # A text of its own: players draw from random.Random(seed), too.
            random.Random(f"trading_env {seed}"),
            self._num_rows,
            options["num_assets"],
            volatility=options["volatility"],
            drift=options["drift"],
            pull=options["pull"],
        )

    def _now(self, step: int) -> tuple[float, ...]:
        """The prices at which the orders after so many steps are filled."""
        return self._prices.rows[self._options["window"] - 1 + step]

    def _filled(self, action: TradingAction) -> Portfolio:
        assets = self._prices.assets
        unknown = sorted(set(action.orders) - set(assets))
        if unknown:
            raise IllegalActionError(
                f"expected orders for {', '.join(assets)}, got one for {unknown[0]!r}"
            )
        orders = {assets.index(name): number for name, number in action.orders.items()}
        try:
            prices = self._now(self._state.step_count)
            return self._portfolio.traded(orders, prices, self._options["cost"])
        except (ValueError, OverflowError) as error:
            raise IllegalActionError(
                f"expected orders that can be filled, got {str(action.orders)[:200]}: {error}"
            ) from None

    def _shown(self) -> TradingObservation:
        step, window = self._state.step_count, self._options["window"]
        seen = self._prices.window(step, window)
        return TradingObservation(
            assets=list(seen.assets),
            prices=[list(row) for row in seen.rows],
            date=seen.dates[-1],
            cash=self._portfolio.cash,
            shares=list(self._portfolio.shares),
            value=self._state.value,
            cost=self._options["cost"],
            steps_left=self._options["num_steps"] - step,
        )


def _check(options: JsonObject) -> None:
    for name, kinds in {"market": Kind, "text_style": TextStyle}.items():
        if options[name] not in get_args(kinds):
            offered = ", ".join(get_args(kinds))
            raise ConfigError(f"expected {name} out of {offered}, got {options[name]!r}")
    for name, highest in {"num_assets": 26, "num_steps": 100_000, "window": 10_000}.items():
        value = options[name]
        if type(value) is not int or not 1 <= value <= highest:
            raise ConfigError(f"expected {name} from 1 to {highest}, got {value!r}")
    ranges = {"cost": (0, 0.5), "test_share": (0, 0.9), "volatility": (0, 1), "drift": (-1, 1)}
    for name, (lowest, most) in {**ranges, "cash": (1e-3, 1e15), "pull": (1e-6, 1)}.items():
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"expected {name} as a number, got {value!r}")
        if not lowest <= value <= most:
            raise ConfigError(f"expected {name} from {lowest:g} to {most:g}, got {value!r}")
