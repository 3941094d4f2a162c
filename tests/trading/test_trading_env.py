"""Tests of trading: prices, orders, rewards and text."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from ludus.env.check import check_environment
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.errors import (
    ActionParseError,
    ConfigError,
    EpisodeStateError,
    IllegalActionError,
    NotFoundError,
)
from trading_env import TradingAction, TradingEnv, TradingObservation, make_environment
from trading_env.market.file import read_prices
from trading_env.market.simulation import simulate
from trading_env.policies import fixed_policies
from trading_env.portfolio import Portfolio, buy_equally, count_affordable_shares
from trading_env.server.windows import Windows
from trading_env.text import TradingRenderer

OBSERVATION = TradingObservation(
    assets=["A"],
    prices=[[98.0], [100.0]],
    date="2",
    cash=250.0,
    shares=[3],
    value=550.0,
    cost=0.0,
    steps_left=4,
)
TWO_ASSETS = OBSERVATION.model_copy(
    update={"assets": ["A", "B"], "prices": [[100.0, 40.0]], "shares": [3, 0]}
)


def play_episode(policy: str, seed: int, **options: Any) -> tuple[float, bool | None]:
    """Return the episode's return and success."""
    environment = make_environment(**options)
    player, rng = fixed_policies(options)[policy], random.Random(f"player {seed}")
    transition, episode_return = environment.reset(seed=seed), 0.0
    while not transition.terminated:
        action = TradingAction.model_validate(player(transition.observation.model_dump(), rng))
        transition = environment.step(action)
        assert transition.reward is not None
        episode_return += transition.reward
    return episode_return, transition.success


def write_prices(tmp_path: Path, text: str) -> str:
    path = tmp_path / "prices.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_assets": 2, "text_style": "rules"}])
def test_environment_contract(options: dict[str, Any]) -> None:
    def make_with_options() -> Any:
        return make_environment(**options)

    check_environment(make_with_options, seeds=range(2), num_steps=20).raise_if_failed()


@pytest.mark.slow
def test_package_is_importable_under_envs() -> None:
    package = importlib.import_module("envs.trading_env")
    assert package.TradingAction(orders={"A": 3}).orders == {"A": 3}
    assert package.TradingEnv.default_url == "http://localhost:8009"


def test_orders_are_filled_at_the_price_plus_cost() -> None:
    start = Portfolio(1000.0, (0, 4))
    portfolio = start.fill({0: 11, 1: -4}, (100.0, 50.0), 0.01)
    assert portfolio.shares == (11, 0)
    assert portfolio.cash == pytest.approx(1000 + 4 * 50 * 0.99 - 11 * 100 * 1.01)
    with pytest.raises(ValueError, match="not enough cash"):
        start.fill({0: 10}, (100.0, 50.0), 0.01)
    with pytest.raises(ValueError, match="cannot sell 5 shares, only 4 owned"):
        start.fill({1: -5}, (100.0, 50.0), 0.01)
    assert count_affordable_shares(1000.0, 100.0, 0.0) == 10
    assert count_affordable_shares(1000.0, 100.0, 0.001) == 9
    assert buy_equally(1000.0, (100.0, 40.0), 0.0) == Portfolio(20.0, (5, 12))


def test_return_is_log_return_and_success_requires_beating_buy_and_hold() -> None:
    for seed in range(5):
        environment = make_environment()
        episode_return, success = play_episode("buy_and_hold", seed)
        environment.reset(seed=seed)
        state = environment.state
        assert episode_return == pytest.approx(math.log(state.hold_value / 1000.0))
        assert success is False
        cash_return, cash_success = play_episode("cash", seed)
        assert (cash_return, cash_success) == (0.0, state.hold_value < 1000.0)


@pytest.mark.slow
def test_mean_reversion_policy_beats_random_and_buy_and_hold() -> None:
    seeds = range(150)
    returns = {
        name: statistics.fmean(play_episode(name, seed)[0] for seed in seeds)
        for name in ("random", "buy_and_hold", "revert")
    }
    assert returns["revert"] > 0.1
    assert abs(returns["random"]) < 0.04 and abs(returns["buy_and_hold"]) < 0.04


def test_simulated_prices_have_the_expected_statistics() -> None:
    def log_prices(kind: Any, seed: int) -> list[float]:
        prices = simulate(
            kind, random.Random(seed), 4000, 1, volatility=0.02, drift=0.001, pull=0.3
        )
        return [math.log(row[0] / 100) for row in prices.rows]

    walk_prices = log_prices("walk", 1)
    assert walk_prices == log_prices("walk", 1) != log_prices("walk", 2)
    changes = [new - old for old, new in itertools.pairwise(walk_prices)]
    assert statistics.stdev(changes) == pytest.approx(0.02, rel=0.05)
    assert statistics.fmean(changes) == pytest.approx(0.001 - 0.0002, abs=0.001)
    reverting_prices = log_prices("reverting", 1)
    assert statistics.stdev(reverting_prices) == pytest.approx(0.02 / math.sqrt(0.51), rel=0.08)
    regimes = simulate("regimes", random.Random(3), 200, 1, volatility=0.0, drift=0.01, pull=0.3)
    log_changes = [round(math.log(b[0] / a[0]), 9) for a, b in itertools.pairwise(regimes.rows)]
    assert set(log_changes) == {0.01, -0.01}
    assert 8 <= sum(a != b for a, b in itertools.pairwise(log_changes)) <= 36  # about a tenth


@pytest.mark.parametrize(
    ("text", "orders"),
    [
        ("hold", {}),
        ("HOLD", {}),
        ("buy 2", {"A": 2}),
        ("buy", {"A": 2}),
        ("sell", {"A": -3}),
        ("Sell  1 a", {"A": -1}),
    ],
)
def test_order_text_parses_to_the_expected_orders(text: str, orders: dict[str, int]) -> None:
    assert TradingRenderer("compact", True).parse(text, OBSERVATION).orders == orders


def test_orders_for_several_assets_are_parsed() -> None:
    renderer = TradingRenderer("rules", True)
    response = "<think>buy 1 A?</think> <answer>sell 2 A, buy 6 B</answer>"
    assert renderer.parse(response, TWO_ASSETS).orders == {"A": -2, "B": 6}
    for text in ("buy 1", "buy 1 A, sell 1 A", "buy 1 C", "buy 9 B"):
        with pytest.raises(ActionParseError):
            renderer.parse(text, TWO_ASSETS)
    answers = renderer.legal_answers(TWO_ASSETS)
    assert {"hold", "sell A", "sell 2 A", "buy B", "buy 5 B"} <= set(answers)
    assert "sell B" not in answers
    assert all(renderer.parse(answer, TWO_ASSETS) is not None for answer in answers)


@pytest.mark.parametrize("text", ["", "buy 3", "sell 4", "buy 0", "buy -1", "buy two", "wait"])
def test_invalid_or_impossible_orders_are_refused(text: str) -> None:
    with pytest.raises(ActionParseError, match="got "):
        TradingRenderer("compact", True).parse(text, OBSERVATION)


def test_compact_and_rules_styles_render_the_expected_text() -> None:
    def render(style: Any, observation: TradingObservation) -> list[str]:
        messages = TradingRenderer(style, True).render(observation, first=True)
        return [message["content"] for message in messages]

    assert render("compact", OBSERVATION) == ["98 100 shares 3\ncash 250"]
    rules, situation = render("rules", TWO_ASSETS)
    assert "Name the asset, as in buy 3 B" in rules
    assert "4 decisions left" in situation and "Total value: 550.00." in situation
    last_observation = OBSERVATION.model_copy(update={"steps_left": 0})
    assert render("compact", last_observation) == ["over 550"]
    assert TradingRenderer("compact", True).legal_answers(last_observation) == []
    renderer = TradingRenderer("compact", False)
    assert renderer.legal_answers(OBSERVATION) == ["hold", "buy", "sell"]


def test_impossible_orders_do_not_change_the_state() -> None:
    environment = make_environment()
    with pytest.raises(EpisodeStateError):
        environment.step(TradingAction())
    environment.reset(seed=1)
    for orders in ({"A": 10**6}, {"A": -1}, {"B": 1}, {"A": 10**400}):
        with pytest.raises(IllegalActionError, match=r"cannot be filled|no asset"):
            environment.step(TradingAction(orders=orders))
    assert environment.state.step_count == 0


def test_last_part_of_a_file_is_used_only_for_test_seeds(tmp_path: Path) -> None:
    lines = [f"2024-{1 + day // 28:02}-{1 + day % 28:02},{100 + day}" for day in range(100)]
    path = write_prices(tmp_path, "\n".join(["Date,Close", *lines]))
    environment = make_environment(path=path, num_steps=5, window=3, cost=0.0)
    tasks = environment.tasks
    assert tasks is not None and (tasks.num_tasks, tasks.num_test_tasks) == (73, 13)

    def read_first_prices(seeds: range) -> set[float]:
        return {environment.reset(seed=seed).observation.prices[0][0] for seed in seeds}

    assert read_first_prices(range(73)) == {100.0 + day for day in range(73)}
    assert read_first_prices(range(2**31, 2**31 + 13)) == {180.0 + day for day in range(13)}
    observation = environment.reset(seed=0).observation
    assert (observation.date, observation.prices) == ("2024-01-03", [[100.0], [101.0], [102.0]])


def test_wide_and_long_files_with_several_assets_are_read(tmp_path: Path) -> None:
    wide_file = write_prices(tmp_path, "date,X,Y\n2024-01-01,1,2\n2024-01-02,3,4\n")
    assert read_prices(wide_file, (), "").rows == ((1.0, 2.0), (3.0, 4.0))
    assert read_prices(wide_file, ("Y",), "").assets == ("Y",)
    long_file = tmp_path / "long.csv"
    long_file.write_text("date,tic,close\n1,X,5\n1,Y,6\n2,X,7\n3,X,8\n3,Y,9\n", encoding="utf-8")
    prices = read_prices(str(long_file), (), "tic")
    assert (prices.assets, prices.dates) == (("X", "Y"), ("1", "3"))
    assert prices.rows == ((5.0, 6.0), (8.0, 9.0))


@pytest.mark.slow
def test_parquet_file_is_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    path = tmp_path / "prices.parquet"
    parquet.write_table(arrow.table({"date": ["1", "2"], "close": [1.5, 2.5]}), path)
    assert read_prices(str(path), (), "").rows == ((1.5,), (2.5,))


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ("date,close\n1,2\n2,x\n", {}, ConfigError, "got 'x' in row 2, column 'close'"),
        ("date,close\n1,2\n2,-3\n", {}, ConfigError, "row 2"),
        ("date,close\n1,2\n2,nan\n", {}, ConfigError, "row 2"),
        ("date,close\n2,2\n1,3\n", {}, ConfigError, "not in the order of their dates"),
        ("date,close\n", {}, ConfigError, "has no rows"),
        ("date,close\n1,2\n", {"columns": ["closed"]}, NotFoundError, "did you mean 'close'"),
        ("date,close\n1,2\n", {}, ConfigError, "needs 20 rows of prices"),
        ("date,close,tic\n1,2,A\n", {"asset_column": "ticker"}, NotFoundError, "'tic'"),
    ],
)
def test_invalid_files_are_refused(
    tmp_path: Path, text: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_environment(path=write_prices(tmp_path, text), **options)


@pytest.mark.parametrize(
    "options",
    [{"market": "up"}, {"cost": 0.9}, {"num_steps": 0}, {"cash": True}, {"path": "no.csv"}],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, NotFoundError), match=r"expected|no price file"):
        make_environment(**options)


def test_training_windows_end_before_test_windows() -> None:
    windows = Windows(50, 10, 0.3)
    end = max(windows.find_start_row(seed) for seed in range(windows.num_train)) + 10
    start = min(windows.find_start_row(2**31 + seed) for seed in range(windows.num_test))
    assert end == start == 35
    assert Windows(50, 10, 0.0).find_start_row(2**31) == Windows(50, 10, 0.0).find_start_row(2**31)


@pytest.mark.slow
async def test_typed_client_trades_over_http() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as server:
        reward = await asyncio.to_thread(trade_over_http, server.http_address)
    environment = make_environment()
    environment.reset(seed=3)
    assert reward == environment.step(TradingAction(orders={"A": 2})).reward


def trade_over_http(address: str) -> float | None:
    """Trade over HTTP and return the reward."""
    with TradingEnv(base_url=address) as env:
        env.reset(seed=3)
        result = env.step(TradingAction(orders={"A": 2}))
        assert result.observation.shares == [2]
        return result.reward
