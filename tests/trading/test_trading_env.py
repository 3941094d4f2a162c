"""Markets: what is simulated and read, filled, paid and said."""

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
from trading_env.portfolio import Portfolio, affordable, bought_equally
from trading_env.server.windows import Windows
from trading_env.text import TradingRenderer

SHOWN = TradingObservation(
    assets=["A"],
    prices=[[98.0], [100.0]],
    date="2",
    cash=250.0,
    shares=[3],
    value=550.0,
    cost=0.0,
    steps_left=4,
)
PAIR = SHOWN.model_copy(update={"assets": ["A", "B"], "prices": [[100.0, 40.0]], "shares": [3, 0]})


def played(policy: str, seed: int, **options: Any) -> tuple[float, bool | None]:
    """The return of an episode, and its success."""
    environment = make_environment(**options)
    act, rng = fixed_policies(options)[policy], random.Random(f"player {seed}")
    result, total = environment.reset(seed=seed), 0.0
    while not result.terminated:
        action = TradingAction.model_validate(act(result.observation.model_dump(), rng))
        result = environment.step(action)
        assert result.reward is not None
        total += result.reward
    return total, result.success


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "prices.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_assets": 2, "text_style": "rules"}])
def test_every_rule_of_the_environment_contract_holds(options: dict[str, Any]) -> None:
    def make() -> Any:
        return make_environment(**options)

    check_environment(make, seeds=range(2), num_steps=20).raise_if_failed()


def test_the_classes_are_found_beside_those_of_the_other_packages() -> None:
    package = importlib.import_module("envs.trading_env")
    assert package.TradingAction(orders={"A": 3}).orders == {"A": 3}
    assert package.TradingEnv.default_url == "http://localhost:8009"


def test_orders_are_paid_at_the_last_price_with_their_cost_and_never_on_credit() -> None:
    start = Portfolio(1000.0, (0, 4))
    after = start.traded({0: 11, 1: -4}, (100.0, 50.0), 0.01)
    assert after.shares == (11, 0)
    assert after.cash == pytest.approx(1000 + 4 * 50 * 0.99 - 11 * 100 * 1.01)
    with pytest.raises(ValueError, match="is spent"):
        start.traded({0: 10}, (100.0, 50.0), 0.01)
    with pytest.raises(ValueError, match="5 shares are sold, 4 are held"):
        start.traded({1: -5}, (100.0, 50.0), 0.01)
    assert affordable(1000.0, 100.0, 0.0) == 10
    assert affordable(1000.0, 100.0, 0.001) == 9
    assert bought_equally(1000.0, (100.0, 40.0), 0.0) == Portfolio(20.0, (5, 12))


def test_rewards_add_up_to_the_log_return_and_success_is_more_than_buy_and_hold() -> None:
    for seed in range(5):
        environment = make_environment()
        total, success = played("buy_and_hold", seed)
        environment.reset(seed=seed)
        state = environment.state
        assert total == pytest.approx(math.log(state.hold_value / 1000.0))
        assert success is False
        cash_total, cash_success = played("cash", seed)
        assert (cash_total, cash_success) == (0.0, state.hold_value < 1000.0)


def test_who_knows_that_prices_revert_earns_what_chance_and_holding_do_not() -> None:
    seeds = range(150)
    returns = {
        name: statistics.fmean(played(name, seed)[0] for seed in seeds)
        for name in ("random", "buy_and_hold", "revert")
    }
    assert returns["revert"] > 0.1
    assert abs(returns["random"]) < 0.04 and abs(returns["buy_and_hold"]) < 0.04


def test_simulated_prices_follow_from_the_seed_and_have_the_moments_of_their_process() -> None:
    def logs(kind: Any, seed: int) -> list[float]:
        drawn = simulate(kind, random.Random(seed), 4000, 1, volatility=0.02, drift=0.001, pull=0.3)
        return [math.log(row[0] / 100) for row in drawn.rows]

    walk = logs("walk", 1)
    assert walk == logs("walk", 1) != logs("walk", 2)
    changes = [after - before for before, after in itertools.pairwise(walk)]
    assert statistics.stdev(changes) == pytest.approx(0.02, rel=0.05)
    assert statistics.fmean(changes) == pytest.approx(0.001 - 0.0002, abs=0.001)
    reverting = logs("reverting", 1)
    assert statistics.stdev(reverting) == pytest.approx(0.02 / math.sqrt(0.51), rel=0.08)
    calm = simulate("regimes", random.Random(3), 200, 1, volatility=0.0, drift=0.01, pull=0.3)
    steps = [round(math.log(b[0] / a[0]), 9) for a, b in itertools.pairwise(calm.rows)]
    assert set(steps) == {0.01, -0.01}
    assert 8 <= sum(a != b for a, b in itertools.pairwise(steps)) <= 36  # a tenth of them


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
def test_orders_are_read_from_their_words(text: str, orders: dict[str, int]) -> None:
    assert TradingRenderer("compact", True).parse(text, SHOWN).orders == orders


def test_orders_for_several_assets_name_them() -> None:
    renderer = TradingRenderer("rules", True)
    answer = "<think>buy 1 A?</think> <answer>sell 2 A, buy 6 B</answer>"
    assert renderer.parse(answer, PAIR).orders == {"A": -2, "B": 6}
    for text in ("buy 1", "buy 1 A, sell 1 A", "buy 1 C", "buy 9 B"):
        with pytest.raises(ActionParseError):
            renderer.parse(text, PAIR)
    answers = renderer.legal_answers(PAIR)
    assert {"hold", "sell A", "sell 2 A", "buy B", "buy 5 B"} <= set(answers)
    assert "sell B" not in answers
    assert all(renderer.parse(answer, PAIR) is not None for answer in answers)


@pytest.mark.parametrize("text", ["", "buy 3", "sell 4", "buy 0", "buy -1", "buy two", "wait"])
def test_what_is_no_order_or_cannot_be_filled_is_no_action(text: str) -> None:
    with pytest.raises(ActionParseError, match="expected"):
        TradingRenderer("compact", True).parse(text, SHOWN)


def test_the_market_is_told_in_few_words_or_in_sentences() -> None:
    def told(style: Any, shown: TradingObservation) -> list[str]:
        return [m["content"] for m in TradingRenderer(style, True).render(shown, first=True)]

    assert told("compact", SHOWN) == ["98 100 shares 3\ncash 250"]
    rules, prose = told("rules", PAIR)
    assert "Name the asset, as in buy 3 B" in rules
    assert "4 decisions are left" in prose and "You own 550.00 in all." in prose
    over = SHOWN.model_copy(update={"steps_left": 0})
    assert told("compact", over) == ["over 550"]
    assert TradingRenderer("compact", True).legal_answers(over) == []
    plain = TradingRenderer("compact", False)
    assert plain.legal_answers(SHOWN) == ["hold", "buy", "sell"]


def test_orders_that_cannot_be_filled_change_nothing() -> None:
    environment = make_environment()
    with pytest.raises(EpisodeStateError):
        environment.step(TradingAction())
    environment.reset(seed=1)
    for orders in ({"A": 10**6}, {"A": -1}, {"B": 1}, {"A": 10**400}):
        with pytest.raises(IllegalActionError, match="expected orders"):
            environment.step(TradingAction(orders=orders))
    assert environment.state.step_count == 0


def test_a_file_is_played_in_windows_and_its_last_part_only_in_the_test(tmp_path: Path) -> None:
    lines = [f"2024-{1 + day // 28:02}-{1 + day % 28:02},{100 + day}" for day in range(100)]
    path = written(tmp_path, "\n".join(["Date,Close", *lines]))
    environment = make_environment(path=path, num_steps=5, window=3, cost=0.0)
    tasks = environment.tasks
    assert tasks is not None and (tasks.num_tasks, tasks.num_test_tasks) == (73, 13)

    def first_prices(seeds: range) -> set[float]:
        return {environment.reset(seed=seed).observation.prices[0][0] for seed in seeds}

    assert first_prices(range(73)) == {100.0 + day for day in range(73)}
    assert first_prices(range(2**31, 2**31 + 13)) == {180.0 + day for day in range(13)}
    shown = environment.reset(seed=0).observation
    assert (shown.date, shown.prices) == ("2024-01-03", [[100.0], [101.0], [102.0]])


def test_files_of_several_assets_have_columns_or_rows_for_each(tmp_path: Path) -> None:
    wide = written(tmp_path, "date,X,Y\n2024-01-01,1,2\n2024-01-02,3,4\n")
    assert read_prices(wide, (), "").rows == ((1.0, 2.0), (3.0, 4.0))
    assert read_prices(wide, ("Y",), "").assets == ("Y",)
    long = tmp_path / "long.csv"
    long.write_text("date,tic,close\n1,X,5\n1,Y,6\n2,X,7\n3,X,8\n3,Y,9\n", encoding="utf-8")
    prices = read_prices(str(long), (), "tic")
    assert (prices.assets, prices.dates) == (("X", "Y"), ("1", "3"))
    assert prices.rows == ((5.0, 6.0), (8.0, 9.0))


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    path = tmp_path / "prices.parquet"
    parquet.write_table(arrow.table({"date": ["1", "2"], "close": [1.5, 2.5]}), path)
    assert read_prices(str(path), (), "").rows == ((1.5,), (2.5,))


@pytest.mark.parametrize(
    ("text", "options", "error", "said"),
    [
        ("date,close\n1,2\n2,x\n", {}, ConfigError, "row 2, column 'close', got 'x'"),
        ("date,close\n1,2\n2,-3\n", {}, ConfigError, "row 2"),
        ("date,close\n1,2\n2,nan\n", {}, ConfigError, "row 2"),
        ("date,close\n2,2\n1,3\n", {}, ConfigError, "in the order of their dates"),
        ("date,close\n", {}, ConfigError, "got none"),
        ("date,close\n1,2\n", {"columns": ["closed"]}, NotFoundError, "did you mean 'close'"),
        ("date,close\n1,2\n", {}, ConfigError, "expected at least 20 rows"),
        ("date,close,tic\n1,2,A\n", {"asset_column": "ticker"}, NotFoundError, "'tic'"),
    ],
)
def test_files_that_hold_no_prices_are_refused(
    tmp_path: Path, text: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make_environment(path=written(tmp_path, text), **options)


@pytest.mark.parametrize(
    "options",
    [{"market": "up"}, {"cost": 0.9}, {"num_steps": 0}, {"cash": True}, {"path": "no.csv"}],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, NotFoundError), match="expected"):
        make_environment(**options)


def test_windows_of_training_end_before_those_of_the_test_begin() -> None:
    windows = Windows(50, 10, 0.3)
    last = max(windows.start_of(seed) for seed in range(windows.num_train)) + 10
    first = min(windows.start_of(2**31 + seed) for seed in range(windows.num_test))
    assert last == first == 35
    assert Windows(50, 10, 0.0).start_of(2**31) == Windows(50, 10, 0.0).start_of(2**31)


@pytest.mark.slow
async def test_the_typed_client_trades_over_http() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as up:
        first = await asyncio.to_thread(traded_over, up.http_address)
    environment = make_environment()
    environment.reset(seed=3)
    assert first == environment.step(TradingAction(orders={"A": 2})).reward


def traded_over(address: str) -> float | None:
    with TradingEnv(base_url=address) as env:
        env.reset(seed=3)
        result = env.step(TradingAction(orders={"A": 2}))
        assert result.observation.shares == [2]
        return result.reward
