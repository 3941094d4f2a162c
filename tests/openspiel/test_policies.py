"""Tests of the baselines, the exact solutions and the strategy chart."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

import pyspiel
import pytest

from ludus.proto.errors import NotFoundError
from openspiel_env import OpenSpielObservation, make_environment
from openspiel_env.best_response import make_best_response
from openspiel_env.games import load_game
from openspiel_env.policies import (
    fixed_policies,
    follow_ball,
    make_seat_policies,
    play_always_stand,
    play_basic_strategy,
    play_dealer_rule,
    play_minimax,
    play_random,
)
from openspiel_env.policy_chart import (
    blackjack_brief_chart,
    blackjack_chart,
    blackjack_rules_chart,
)
from openspiel_env.seat_view import SeatView
from openspiel_env.solutions import load_blackjack_states, reference_returns
from openspiel_env.solving import blackjack
from openspiel_env.solving.small_games import solve_hidden_information, solve_perfect_information
from tests.openspiel.seats import HIT, STAND, compute_returns, play_episode, select_random_states

NUM_EPISODES = 4000
BLACKJACK_POLICIES = {
    "random": play_random,
    "always_stand": play_always_stand,
    "dealer_rule": play_dealer_rule,
    "basic_strategy": play_basic_strategy,
}


@pytest.fixture(scope="module")
def blackjack_returns() -> dict[str, list[float]]:
    """Map the name of each policy to its returns on the same deals."""
    options = {"game": "blackjack"}
    return {
        name: compute_returns(options, NUM_EPISODES, policy)
        for name, policy in BLACKJACK_POLICIES.items()
    }


# -- blackjack -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", BLACKJACK_POLICIES)
def test_blackjack_returns_match_the_exact_values(
    name: str, blackjack_returns: dict[str, list[float]]
) -> None:
    returns, exact_result = blackjack_returns[name], reference_returns("blackjack")[name]
    margin = 3 * statistics.stdev(returns) / NUM_EPISODES**0.5
    assert statistics.mean(returns) == pytest.approx(exact_result.expected_return, abs=margin)
    for rate, outcome in ((exact_result.win_rate, 1.0), (exact_result.draw_rate, 0.0)):
        margin = 3 * (rate * (1 - rate) / NUM_EPISODES) ** 0.5
        assert returns.count(outcome) / NUM_EPISODES == pytest.approx(rate, abs=margin)


@pytest.mark.slow
def test_blackjack_policies_rank_in_the_expected_order(
    blackjack_returns: dict[str, list[float]],
) -> None:
    for lower_policy, higher_policy in itertools.pairwise(BLACKJACK_POLICIES):
        pairs = zip(blackjack_returns[higher_policy], blackjack_returns[lower_policy], strict=True)
        differences = [high - low for high, low in pairs]
        assert (
            statistics.mean(differences) > 1.96 * statistics.stdev(differences) / NUM_EPISODES**0.5
        )


@pytest.mark.parametrize(
    ("policy", "win_rate", "draw_rate", "expected_return"),
    [
        ("optimal", 0.4328, 0.0919, -0.0425),
        ("basic_strategy", 0.4324, 0.0924, -0.0428),
        ("dealer_rule", 0.4088, 0.1023, -0.0801),
        ("always_stand", 0.3835, 0.0496, -0.1834),
        ("random", 0.2828, 0.0417, -0.3927),
    ],
)
def test_blackjack_reference_returns_have_known_values(
    policy: str, win_rate: float, draw_rate: float, expected_return: float
) -> None:
    result = reference_returns("blackjack")[policy]
    assert result.win_rate == pytest.approx(win_rate, abs=5.1e-5)
    assert result.draw_rate == pytest.approx(draw_rate, abs=5.1e-5)
    assert result.expected_return == pytest.approx(expected_return, abs=5.1e-5)
    assert result.expected_return == pytest.approx(2 * result.win_rate + result.draw_rate - 1)


def test_chart_has_every_decision_once() -> None:
    states = load_blackjack_states()
    cells = {(state.total, state.is_soft, state.up_card) for state in states}
    assert len(states) == len(cells) == (18 + 10) * 10
    reached_cells = set()
    for seed in range(300):
        for transition in play_episode({"game": "blackjack"}, seed):
            if not transition.terminated:
                reached_cells.add(read_cell(transition.observation))
    assert reached_cells <= cells
    assert len(reached_cells) > 150


@pytest.mark.parametrize(
    ("total", "is_soft", "up_card", "move"),
    [
        (16, False, "10", "HIT"),
        (16, False, "6", "STAND"),
        (12, False, "3", "HIT"),
        (12, False, "4", "STAND"),
        (17, False, "A", "STAND"),
        (17, True, "6", "HIT"),
        (18, True, "8", "STAND"),
        (18, True, "9", "HIT"),
        (18, True, "A", "HIT"),
        (21, True, "10", "STAND"),
    ],
)
def test_basic_strategy_picks_the_known_move(
    total: int, is_soft: bool, up_card: str, move: str
) -> None:
    [state] = [
        state
        for state in load_blackjack_states()
        if (state.total, state.is_soft, state.up_card) == (total, is_soft, up_card)
    ]
    assert state.best_move == move


def test_dealer_rule_hits_below_17() -> None:
    moves = {True: set(), False: set()}
    for seed in range(300):
        observation = make_environment(game="blackjack").reset(seed=seed).observation
        total, _, _ = read_cell(observation)
        moves[total < 17].add(play_dealer_rule(observation, random.Random(0)))
    assert moves == {True: {HIT}, False: {STAND}}


def test_chart_prompts_equal_the_environment_prompts() -> None:
    charts = (blackjack_chart(), blackjack_rules_chart(), blackjack_brief_chart())
    for state, compact_prompt, rules_prompt, brief_prompt in zip(
        load_blackjack_states(), *charts, strict=True
    ):
        kind = "soft" if state.is_soft else "hard"
        assert compact_prompt.messages == [
            {"role": "user", "content": f"{kind} {state.total} vs {state.up_card}"}
        ]
        assert [message["role"] for message in rules_prompt.messages] == ["system", "user"]
        assert f"({kind} {state.total}). The dealer shows: " in rules_prompt.messages[1]["content"]
        assert f" You have a {kind} " in brief_prompt.messages[1]["content"]
        for prompt in (compact_prompt, rules_prompt, brief_prompt):
            assert prompt.answers == ["HIT", "STAND"]
            assert prompt.reference == state.best_move
            assert (prompt.panel, prompt.row, prompt.column) == (
                kind,
                str(state.total),
                state.up_card,
            )


def read_cell(observation: OpenSpielObservation) -> tuple[int, bool, str]:
    renderer = make_environment(game="blackjack").text_renderer
    kind, total, _, up_card = renderer.render(observation, first=True)[0]["content"].split()
    return int(total), kind == "soft", up_card


# -- other games -----------------------------------------------------------------------


@pytest.mark.parametrize("columns", [5, 9])
def test_follow_ball_catches_every_ball(columns: int) -> None:
    options = {"game": "catch", "game_params": {"columns": columns}}
    policy = fixed_policies(options)["follow_ball"]
    returns = compute_returns(
        options, 40, lambda observation, rng: policy(observation.model_dump(), rng)["action_id"]
    )
    assert returns == [1.0] * 40
    assert reference_returns("catch")["optimal"].expected_return == 1.0
    if columns == 5:
        assert compute_returns(options, 5, follow_ball) == [1.0] * 5


@pytest.mark.parametrize("seat", [0, 1])
def test_minimax_never_loses(seat: int) -> None:
    loaded_game = load_game("tic_tac_toe")
    view = SeatView(loaded_game, seat)

    def find_worst_return(state: pyspiel.State) -> float:
        if state.is_terminal():
            return state.player_return(seat)
        actions = state.legal_actions()
        if state.current_player() == seat:
            actions = [play_minimax(view.observe(state), random.Random(0))]
        return min(find_worst_return(state.child(action)) for action in actions)

    assert find_worst_return(loaded_game.game.new_initial_state()) == 0


def test_baselines_can_play_the_opponent_seat() -> None:
    options = {"game": "tic_tac_toe", "opponent": "minimax"}
    assert set(compute_returns(options, 5, play_minimax)) == {0.0}
    assert statistics.mean(compute_returns(options, 60, play_random)) < -0.5


@pytest.mark.slow
@pytest.mark.parametrize("game", ["connect_four", "connect_four(rows=5,columns=6)"])
def test_search_beats_random_moves(game: str) -> None:
    loaded_game = load_game(game)
    search_policy = make_seat_policies(loaded_game)["mcts"]
    assert compute_returns({"game": game, "opponent": "mcts(5)"}, 10, search_policy) == [1.0] * 10
    assert (
        compute_returns({"game": game, "opponent": search_policy}, 10, play_random) == [-1.0] * 10
    )
    for seat, view in enumerate([SeatView(loaded_game, 0), SeatView(loaded_game, 1)]):
        for state in select_random_states(
            game, 3, lambda state, seat=seat: state.current_player() == seat
        ):
            observation = view.observe(state)
            moves = [search_policy(observation, random.Random(seed)) for seed in (1, 1)]
            assert moves[0] == moves[1] and moves[0] in state.legal_actions()
            winning_moves = [
                action
                for action in state.legal_actions()
                if state.child(action).player_return(seat) > 0
            ]
            assert not winning_moves or moves[0] in winning_moves


@pytest.mark.slow
@pytest.mark.parametrize(("game", "best_return"), [("kuhn_poker", 0.5), ("leduc_poker", 2.0875)])
def test_best_response_earns_the_known_return_against_random_play(
    game: str, best_return: float
) -> None:
    # For Leduc poker, 2.0875 is the value of OpenSpiel's best response in the first seat.
    policy = make_best_response(load_game(game))
    returns = compute_returns({"game": game, "opponent": "random"}, NUM_EPISODES, policy)
    standard_error = statistics.stdev(returns) / NUM_EPISODES**0.5
    assert abs(statistics.mean(returns) - best_return) < 3 * standard_error
    if game == "kuhn_poker":
        assert best_return == reference_returns(game)["optimal"].expected_return


@pytest.mark.slow
def test_best_response_plays_both_seats() -> None:
    options = {"game": "kuhn_poker", "opponent": "best_response"}
    assert statistics.mean(compute_returns(options, NUM_EPISODES, play_random)) < -0.3


@pytest.mark.slow
def test_minimax_is_the_best_response_to_random_play() -> None:
    returns = compute_returns({"game": "tic_tac_toe"}, 1000, play_minimax)
    exact_return = reference_returns("tic_tac_toe")["optimal"].expected_return
    assert exact_return == pytest.approx(0.9948, abs=5e-5)
    assert statistics.mean(returns) == pytest.approx(exact_return, abs=3 * (0.0052 / 1000) ** 0.5)


@pytest.mark.parametrize(
    ("game", "seat", "random_return", "optimal_return"),
    [
        ("catch", 0, -0.6, 1.0),
        ("tic_tac_toe", 0, 0.2968, 0.9948),
        ("kuhn_poker", 0, 0.125, 0.5),
        ("kuhn_poker", 1, -0.125, 0.4167),
    ],
)
def test_small_games_have_known_reference_returns(
    game: str, seat: int, random_return: float, optimal_return: float
) -> None:
    results = reference_returns(game, seat)
    assert results["random"].expected_return == pytest.approx(random_return, abs=5e-5)
    assert results["optimal"].expected_return == pytest.approx(optimal_return, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["catch", "tic_tac_toe", "kuhn_poker"])
def test_random_play_matches_the_exact_values(game: str) -> None:
    returns = compute_returns({"game": game}, 1500, play_random)
    margin = 3 * statistics.stdev(returns) / len(returns) ** 0.5
    exact_return = reference_returns(game)["random"].expected_return
    assert statistics.mean(returns) == pytest.approx(exact_return, abs=margin)


def test_unsolved_game_has_no_reference_returns() -> None:
    assert reference_returns("chess") == {}


def test_baselines_accept_and_return_json_data() -> None:
    policies = fixed_policies({"game": "blackjack", "text_style": "rules"})
    assert set(policies) == set(BLACKJACK_POLICIES)
    assert set(fixed_policies("chess")) == {"random"}
    observation = make_environment(game="blackjack").reset(seed=1).observation.model_dump()
    for policy in policies.values():
        assert policy(observation, random.Random(0)) in ({"action_id": 0}, {"action_id": 1})
    with pytest.raises(NotFoundError, match="'chest'; did you mean chess"):
        fixed_policies("chest")


# -- the solver ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("game", "solve"),
    [("catch", solve_perfect_information), ("kuhn_poker", solve_hidden_information)],
)
def test_solver_reproduces_the_stored_returns(game: str, solve: Callable[..., Any]) -> None:
    values = solve(load_game(game).game, 0)
    stored_results = reference_returns(game)
    for name, value in values.items():
        assert value.expected_return == pytest.approx(stored_results[name].expected_return)
        assert value.win == pytest.approx(stored_results[name].win_rate)


def test_standing_on_20_against_a_six_wins_four_times_in_five() -> None:
    hand = (0,) * 9 + (2,)
    value = blackjack.stand(hand, open_card=6)
    # A dealer who shows a six busts about two times in five and rarely reaches 21.
    assert value.win == pytest.approx(0.80, abs=0.02)
    assert 0.05 < value.draw < 0.15
    assert value.expected_return == pytest.approx(2 * value.win + value.draw - 1)


@pytest.mark.long
@pytest.mark.slow
def test_blackjack_solver_reproduces_the_stored_chart() -> None:
    chart = blackjack.find_basic_strategy()
    for state in load_blackjack_states():
        open_card = 1 if state.up_card == "A" else int(state.up_card)
        is_hit = (state.total, state.is_soft, open_card) in chart.hits
        assert is_hit == (state.best_move == "HIT"), state
    stored_results = reference_returns("blackjack")
    optimal_value = blackjack.average_over_deals(blackjack.play_optimally)
    assert optimal_value.expected_return == pytest.approx(stored_results["optimal"].expected_return)
    chart_value = blackjack.evaluate(chart.hit_probability)
    expected_return = stored_results["basic_strategy"].expected_return
    assert chart_value.expected_return == pytest.approx(expected_return)
