from __future__ import annotations

import itertools
import random
import statistics

import pyspiel
import pytest

from ludus.proto.errors import NotFoundError
from openspiel_env import OpenSpielObservation, make_environment
from openspiel_env.best_response import best_response
from openspiel_env.games import load_game
from openspiel_env.policies import (
    always_stand,
    dealer_rule,
    fixed_policies,
    follow_ball,
    minimax,
    play_basic_strategy,
    play_random,
    seat_policies,
)
from openspiel_env.policy_chart import blackjack_chart, blackjack_rules_chart
from openspiel_env.seat_view import SeatView
from openspiel_env.solutions import blackjack_states, reference_returns
from openspiel_env.solving import blackjack
from openspiel_env.solving.small_games import solve_hidden_information, solve_perfect_information
from tests.openspiel.seats import HIT, STAND, episode, final_returns, random_states

NUM_GAMES = 4000
BLACKJACK = {
    "random": play_random,
    "always_stand": always_stand,
    "dealer_rule": dealer_rule,
    "basic_strategy": play_basic_strategy,
}


@pytest.fixture(scope="module")
def blackjack_returns() -> dict[str, list[float]]:
    """The returns of each policy on the same deals."""
    options = {"game": "blackjack"}
    return {name: final_returns(options, NUM_GAMES, policy) for name, policy in BLACKJACK.items()}


# -- blackjack -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", BLACKJACK)
def test_blackjack_policies_return_what_was_computed(name, blackjack_returns) -> None:
    returns, exact = blackjack_returns[name], reference_returns("blackjack")[name]
    margin = 3 * statistics.stdev(returns) / NUM_GAMES**0.5
    assert statistics.mean(returns) == pytest.approx(exact.expected_return, abs=margin)
    for share, outcome in ((exact.win_rate, 1.0), (exact.draw_rate, 0.0)):
        margin = 3 * (share * (1 - share) / NUM_GAMES) ** 0.5
        assert returns.count(outcome) / NUM_GAMES == pytest.approx(share, abs=margin)


@pytest.mark.slow
def test_each_better_blackjack_policy_wins_more_on_the_same_deals(blackjack_returns) -> None:
    for worse, better in itertools.pairwise(BLACKJACK):
        gains = [
            b - w for b, w in zip(blackjack_returns[better], blackjack_returns[worse], strict=True)
        ]
        assert statistics.mean(gains) > 1.96 * statistics.stdev(gains) / NUM_GAMES**0.5


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
def test_blackjack_reference_numbers(policy, win_rate, draw_rate, expected_return) -> None:
    exact = reference_returns("blackjack")[policy]
    assert exact.win_rate == pytest.approx(win_rate, abs=5.1e-5)
    assert exact.draw_rate == pytest.approx(draw_rate, abs=5.1e-5)
    assert exact.expected_return == pytest.approx(expected_return, abs=5.1e-5)
    assert exact.expected_return == pytest.approx(2 * exact.win_rate + exact.draw_rate - 1)


def test_the_chart_has_every_decision_once() -> None:
    states = blackjack_states()
    cells = {(state.total, state.is_soft, state.up_card) for state in states}
    assert len(states) == len(cells) == (18 + 10) * 10
    reached = set()
    for seed in range(300):
        for transition in episode({"game": "blackjack"}, seed):
            if not transition.terminated:
                reached.add(_cell(transition.observation))
    assert reached <= cells
    assert len(reached) > 150


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
def test_basic_strategy_in_well_known_places(total, is_soft, up_card, move) -> None:
    [state] = [
        state
        for state in blackjack_states()
        if (state.total, state.is_soft, state.up_card) == (total, is_soft, up_card)
    ]
    assert state.best_move == move


def test_the_dealer_rule_hits_below_17_and_stands_from_there() -> None:
    moves = {True: set(), False: set()}
    for seed in range(300):
        first = make_environment(game="blackjack").reset(seed=seed).observation
        total, _, _ = _cell(first)
        moves[total < 17].add(dealer_rule(first, random.Random(0)))
    assert moves == {True: {HIT}, False: {STAND}}


def test_probes_ask_what_the_environment_would_ask() -> None:
    for state, brief, rules in zip(
        blackjack_states(), blackjack_chart(), blackjack_rules_chart(), strict=True
    ):
        kind = "soft" if state.is_soft else "hard"
        assert brief.messages == [
            {"role": "user", "content": f"{kind} {state.total} vs {state.up_card}"}
        ]
        assert [message["role"] for message in rules.messages] == ["system", "user"]
        assert f"({kind} {state.total}). The dealer shows: " in rules.messages[1]["content"]
        for probe in (brief, rules):
            assert probe.answers == ["HIT", "STAND"]
            assert probe.reference == state.best_move
            assert (probe.panel, probe.row, probe.column) == (
                kind,
                str(state.total),
                state.up_card,
            )


def _cell(observation: OpenSpielObservation) -> tuple[int, bool, str]:
    renderer = make_environment(game="blackjack").text_renderer
    kind, total, _, up_card = renderer.render(observation, first=True)[0]["content"].split()
    return int(total), kind == "soft", up_card


# -- other games -----------------------------------------------------------------------


@pytest.mark.parametrize("columns", [5, 9])
def test_follow_ball_catches_every_ball(columns: int) -> None:
    options = {"game": "catch", "game_params": {"columns": columns}}
    wire_policy = fixed_policies(options)["follow_ball"]
    returns = final_returns(
        options, 40, lambda o, rng: wire_policy(o.model_dump(), rng)["action_id"]
    )
    assert returns == [1.0] * 40
    assert reference_returns("catch")["optimal"].expected_return == 1.0
    if columns == 5:
        assert final_returns(options, 5, follow_ball) == [1.0] * 5


@pytest.mark.parametrize("seat", [0, 1])
def test_minimax_never_loses_tic_tac_toe_whatever_the_other_does(seat: int) -> None:
    loaded = load_game("tic_tac_toe")
    view = SeatView(loaded, seat)

    def worst_return(state: pyspiel.State) -> float:
        if state.is_terminal():
            return state.player_return(seat)
        actions = state.legal_actions()
        if state.current_player() == seat:
            actions = [minimax(view.observe(state), random.Random(0))]
        return min(worst_return(state.child(action)) for action in actions)

    assert worst_return(loaded.game.new_initial_state()) == 0


def test_fixed_policies_can_play_the_other_seat() -> None:
    options = {"game": "tic_tac_toe", "opponent": "minimax"}
    assert set(final_returns(options, 5, minimax)) == {0.0}
    assert statistics.mean(final_returns(options, 60, play_random)) < -0.5


@pytest.mark.parametrize("game", ["connect_four", "connect_four(rows=5,columns=6)"])
def test_a_search_from_the_board_alone_wins_from_random_moves_and_follows_the_seed(game) -> None:
    loaded = load_game(game)
    search = seat_policies(loaded)["mcts"]
    assert final_returns({"game": game, "opponent": "mcts(5)"}, 10, search) == [1.0] * 10
    assert final_returns({"game": game, "opponent": search}, 10, play_random) == [-1.0] * 10
    for seat, view in enumerate([SeatView(loaded, 0), SeatView(loaded, 1)]):
        for state in random_states(game, 3, lambda s, seat=seat: s.current_player() == seat):
            observation = view.observe(state)
            moves = [search(observation, random.Random(seed)) for seed in (1, 1)]
            assert moves[0] == moves[1] and moves[0] in state.legal_actions()
            winning = [a for a in state.legal_actions() if state.child(a).player_return(seat) > 0]
            assert not winning or moves[0] in winning


@pytest.mark.parametrize(("game", "at_best"), [("kuhn_poker", 0.5), ("leduc_poker", 2.0875)])
def test_the_best_response_wins_from_random_play_what_was_computed(game, at_best) -> None:
    # Leduc's 2.0875 is what OpenSpiel's own best response says of the first seat.
    policy = best_response(load_game(game))
    returns = final_returns({"game": game, "opponent": "random"}, NUM_GAMES, policy)
    error = statistics.stdev(returns) / NUM_GAMES**0.5
    assert abs(statistics.mean(returns) - at_best) < 3 * error
    if game == "kuhn_poker":
        assert at_best == reference_returns(game)["optimal"].expected_return


def test_the_best_response_sits_at_either_seat() -> None:
    options = {"game": "kuhn_poker", "opponent": "best_response"}
    assert statistics.mean(final_returns(options, NUM_GAMES, play_random)) < -0.3


def test_minimax_is_the_best_reply_to_random_play_from_the_first_seat() -> None:
    returns = final_returns({"game": "tic_tac_toe"}, 1000, minimax)
    exact = reference_returns("tic_tac_toe")["optimal"].expected_return
    assert exact == pytest.approx(0.9948, abs=5e-5)
    assert statistics.mean(returns) == pytest.approx(exact, abs=3 * (0.0052 / 1000) ** 0.5)


@pytest.mark.parametrize(
    ("game", "seat", "random_return", "optimal_return"),
    [
        ("catch", 0, -0.6, 1.0),
        ("tic_tac_toe", 0, 0.2968, 0.9948),
        ("kuhn_poker", 0, 0.125, 0.5),
        ("kuhn_poker", 1, -0.125, 0.4167),
    ],
)
def test_reference_numbers_of_small_games(game, seat, random_return, optimal_return) -> None:
    exact = reference_returns(game, seat)
    assert exact["random"].expected_return == pytest.approx(random_return, abs=5e-5)
    assert exact["optimal"].expected_return == pytest.approx(optimal_return, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["catch", "tic_tac_toe", "kuhn_poker"])
def test_random_play_returns_what_was_computed(game: str) -> None:
    returns = final_returns({"game": game}, 1500, play_random)
    margin = 3 * statistics.stdev(returns) / len(returns) ** 0.5
    exact = reference_returns(game)["random"].expected_return
    assert statistics.mean(returns) == pytest.approx(exact, abs=margin)


def test_games_that_nobody_solved_have_no_reference() -> None:
    assert reference_returns("chess") == {}


def test_fixed_policies_speak_json() -> None:
    policies = fixed_policies({"game": "blackjack", "text_style": "rules"})
    assert set(policies) == set(BLACKJACK)
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
def test_small_games_solve_to_the_stored_numbers(game, solve) -> None:
    solved = solve(load_game(game).game, 0)
    stored = reference_returns(game)
    for name, value in solved.items():
        assert value.expected_return == pytest.approx(stored[name].expected_return)
        assert value.win == pytest.approx(stored[name].win_rate)


def test_standing_is_worth_what_the_dealer_draws() -> None:
    twenty = (0,) * 9 + (2,)
    value = blackjack.stand(twenty, open_card=6)
    # A dealer's six ends above 21 about two times in five, and seldom at 21.
    assert value.win == pytest.approx(0.80, abs=0.02)
    assert 0.05 < value.draw < 0.15
    assert value.expected_return == pytest.approx(2 * value.win + value.draw - 1)


@pytest.mark.slow
def test_blackjack_solves_to_the_stored_chart_and_numbers() -> None:
    chart = blackjack.basic_strategy()
    for state in blackjack_states():
        open_card = 1 if state.up_card == "A" else int(state.up_card)
        hits = (state.total, state.is_soft, open_card) in chart.hits
        assert hits == (state.best_move == "HIT"), state
    optimal = blackjack.over_deals(blackjack.play_optimally)
    stored = reference_returns("blackjack")
    assert optimal.expected_return == pytest.approx(stored["optimal"].expected_return)
    basic = blackjack.evaluate(chart.hit_probability)
    assert basic.expected_return == pytest.approx(stored["basic_strategy"].expected_return)
