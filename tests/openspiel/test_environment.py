from __future__ import annotations

import functools
import random

import pytest

from ludus.env.check import check_environment
from ludus.proto.errors import (
    ConfigError,
    EpisodeStateError,
    ErrorCode,
    ExecutionError,
    IllegalActionError,
    InvalidCallError,
    NotFoundError,
)
from openspiel_env import OpenSpielAction, OpenSpielObservation, make_environment
from openspiel_env.chance import draw_weighted
from openspiel_env.games import UNIFORM_CHANCE_GAMES, load_game
from tests.openspiel.seats import (
    HIT,
    OTHER_GAMES,
    OWN_FACE_GAMES,
    STAND,
    episode,
    move,
    play,
    random_states,
)

UP_CARD = slice(33, 85)
PLAYER_HAND = slice(85, 137)
DEALER_HAND = slice(137, 189)


def cards(observation: OpenSpielObservation, hand: slice) -> set[int]:
    return {card for card, held in enumerate(observation.info_state[hand]) if held}


# -- the contract ----------------------------------------------------------------------


@pytest.mark.parametrize("text_style", ["compact", "rules"])
@pytest.mark.parametrize("game", [*OWN_FACE_GAMES, *OTHER_GAMES])
def test_every_rule_of_the_environment_contract_holds(game: str, text_style: str) -> None:
    factory = functools.partial(make_environment, game=game, text_style=text_style)
    check_environment(factory, seeds=range(3), num_steps=12).raise_if_failed()


@pytest.mark.parametrize("game", ["blackjack", "leduc_poker", "negotiation"])
def test_same_seed_and_actions_give_the_same_episode(game: str) -> None:
    first = episode({"game": game}, seed=5)
    random.seed(99)
    again = episode({"game": game}, seed=5)
    assert first == again
    assert any(first != episode({"game": game}, seed=seed) for seed in range(6, 10))


def test_without_a_seed_episodes_differ() -> None:
    environment = make_environment(game="blackjack")
    deals = {tuple(environment.reset().observation.info_state) for _ in range(20)}
    assert len(deals) > 10


# -- one seed, one deal ----------------------------------------------------------------


def test_the_same_seed_deals_the_same_cards_whatever_is_played() -> None:
    environment = make_environment(game="blackjack")
    num_compared = 0
    for seed in range(60):
        first = environment.reset(seed=seed).observation
        stood = environment.step(move(STAND)).observation
        again = environment.reset(seed=seed).observation
        hit = environment.step(move(HIT)).observation
        assert again == first
        drawn_by_player = cards(hit, PLAYER_HAND) - cards(first, PLAYER_HAND)
        dealer = cards(stood, DEALER_HAND)
        if len(dealer) == 3:  # the dealer drew one card: the one that the player would have got
            assert drawn_by_player < dealer
            num_compared += 1
    assert num_compared > 10


def test_opponents_do_not_change_what_chance_deals() -> None:
    def public_cards(opponent: str) -> dict[int, str]:
        options = {"game": "leduc_poker", "opponent": opponent}
        dealt = {}
        for seed in range(40):
            last = episode(options, seed, lambda o, rng: 1)[-1]  # always call
            _, _, public = last.observation.metadata["view"].partition("[Public: ")
            if public:
                dealt[seed] = public[0]
        return dealt

    by_random, by_last = public_cards("random"), public_cards("last")
    both = by_random.keys() & by_last.keys()
    assert [by_random[seed] for seed in both] == [by_last[seed] for seed in both]
    assert len(both) > 15
    assert len(set(by_last.values())) == 6


@pytest.mark.parametrize("game", sorted(UNIFORM_CHANCE_GAMES))
def test_games_drawn_by_index_have_equally_likely_chance_events(game: str) -> None:
    num_events = 0
    for seed in range(30):
        for state in random_states(game, seed, lambda state: state.is_chance_node()):
            events, probabilities = zip(*state.chance_outcomes(), strict=True)
            assert list(events) == state.legal_actions()
            assert probabilities == pytest.approx([1 / len(events)] * len(events))
            num_events += 1
    assert num_events >= 30


def test_weighted_draws_follow_the_probabilities_of_the_game() -> None:
    state = load_game("2048").game.new_initial_state()
    probability = dict(state.chance_outcomes())
    assert len(set(probability.values())) > 1
    rng = random.Random(0)
    draws = [draw_weighted(state, rng) for _ in range(20_000)]
    for event in list(probability)[:4]:
        expected = probability[event]
        margin = 4 * (expected * (1 - expected) / len(draws)) ** 0.5
        assert draws.count(event) / len(draws) == pytest.approx(expected, abs=margin)


def test_rounding_never_leaves_a_weighted_draw_without_an_event() -> None:
    class Chance:
        def chance_outcomes(self) -> list[tuple[int, float]]:
            return [(3, 0.3), (5, 0.6999999), (9, 0.0)]

    class Highest(random.Random):
        def random(self) -> float:
            return 0.99999999

    assert draw_weighted(Chance(), Highest()) == 5


# -- rewards, seats and opponents ------------------------------------------------------


def test_rewards_that_come_while_others_move_are_added_up() -> None:
    for seat in (0, 1):
        transitions = episode({"game": "cribbage", "agent_player": seat}, seed=3)
        total = sum(t.reward for t in transitions[1:])
        scores = transitions[-1].observation.metadata["view"].partition("Scores: ")[2].split()
        winner_bonus = 1000
        assert total % winner_bonus == int(scores[seat])
        assert sum(t.reward != 0 for t in transitions[1:]) > 10


def test_in_zero_sum_games_both_seats_see_the_same_game() -> None:
    for seed in range(20):
        mine = episode(
            {"game": "tic_tac_toe", "opponent": "first"}, seed, lambda o, rng: o.legal_actions[-1]
        )
        theirs = episode(
            {"game": "tic_tac_toe", "opponent": "last", "agent_player": 1},
            seed,
            lambda o, rng: o.legal_actions[0],
        )
        assert mine[-1].reward == -theirs[-1].reward != 0


def test_the_second_seat_sees_the_first_move_of_the_opponent() -> None:
    observation = make_environment(game="tic_tac_toe", agent_player=1).reset(seed=0).observation
    assert observation.opponent_last_action is not None
    assert observation.opponent_last_action not in observation.legal_actions
    assert observation.current_player_id == 1
    assert observation.game_phase == "initial"


@pytest.mark.parametrize(("opponent", "reply"), [("first", 0), ("middle", 5), ("last", 8)])
def test_opponents_choose_by_the_order_of_legal_moves(opponent: str, reply: int) -> None:
    environment = make_environment(game="tic_tac_toe", opponent=opponent)
    environment.reset(seed=0)
    after = environment.step(move(4)).observation
    assert after.opponent_last_action == reply  # legal are 0 1 2 3 5 6 7 8
    assert after.game_phase == "playing"


def test_a_policy_plays_the_other_seat_from_its_own_view() -> None:
    seen: list[OpenSpielObservation] = []

    def spy(observation: OpenSpielObservation, rng: random.Random) -> int:
        seen.append(observation)
        return observation.legal_actions[0]

    environment = make_environment(game="kuhn_poker", opponent=functools.partial(spy))
    assert environment.state.opponent_policy == "partial"
    environment = make_environment(game="kuhn_poker", opponent=spy)
    for _ in play(environment, seed=1):
        pass
    assert environment.state.opponent_policy == "spy"
    assert seen
    assert all(observation.info_state[:2] == [0.0, 1.0] for observation in seen)


def test_an_opponent_that_breaks_the_rules_ends_the_episode_with_an_error() -> None:
    environment = make_environment(game="tic_tac_toe", opponent=lambda observation, rng: 99)
    environment.reset(seed=0)
    with pytest.raises(ExecutionError, match=r"legal move of the opponent.*99"):
        environment.step(move(0))
    with pytest.raises(EpisodeStateError):
        environment.step(move(1))


def test_moves_that_the_rules_hide_are_not_in_the_observation() -> None:
    for game in ("phantom_ttt", "goofspiel"):
        for transition in episode({"game": game}, seed=2):
            assert transition.observation.opponent_last_action is None
    shown = [t.observation.opponent_last_action for t in episode({"game": "kuhn_poker"}, seed=2)]
    assert shown[0] is None
    assert any(action is not None for action in shown)


def test_players_who_would_move_at_once_are_asked_in_turn() -> None:
    environment = make_environment(game="goofspiel")
    assert environment.options["sequential_form"] == "turn_based_simultaneous_game"
    assert environment.state.num_players == 2
    assert "sequential_form" not in make_environment(game="tic_tac_toe").options


# -- illegal and misplaced calls -------------------------------------------------------


def test_an_illegal_action_changes_nothing_and_names_the_legal_ones() -> None:
    undisturbed = episode({"game": "tic_tac_toe"}, seed=4)
    environment = make_environment(game="tic_tac_toe")
    transitions = []
    for transition in play(environment, seed=4):
        transitions.append(transition)
        if transition.terminated:
            break
        state = environment.state
        taken = set(range(9)) - set(transition.observation.legal_actions)
        for action_id in [*taken, -1, 9, 2**40]:
            with pytest.raises(IllegalActionError, match=r"one of \d \(x\(") as raised:
                environment.step(move(action_id))
            assert str(action_id) in raised.value.message
        assert environment.state == state
    assert transitions == undisturbed


def test_steps_outside_an_episode_are_refused() -> None:
    environment = make_environment(game="blackjack")
    with pytest.raises(EpisodeStateError) as raised:
        environment.step(move(STAND))
    assert raised.value.code == ErrorCode.NOT_RESET
    environment.reset(seed=0)
    environment.step(move(STAND))
    with pytest.raises(EpisodeStateError, match="1 steps") as raised:
        environment.step(move(STAND))
    assert raised.value.code == ErrorCode.EPISODE_OVER


def test_a_move_for_another_game_is_refused_and_the_upstream_default_is_not() -> None:
    environment = make_environment(game="kuhn_poker", game_params={"players": 3})
    environment.reset(seed=0)
    with pytest.raises(InvalidCallError, match=r"'kuhn_poker'.*'blackjack'"):
        environment.step(OpenSpielAction(action_id=0, game_name="blackjack"))
    with pytest.raises(InvalidCallError, match="'players': 2"):
        environment.step(OpenSpielAction(action_id=0, game_params={"players": 2}))
    assert environment.state.step_count == 0
    environment.step(OpenSpielAction(action_id=0, game_name="catch", game_params={}))
    assert environment.state.step_count == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"game": "black_jack"}, NotFoundError, "'black_jack'; did you mean blackjack"),
        ({"game": "xyzzy"}, NotFoundError, "registered_names"),
        ({"game": "crossword"}, ConfigError, "structures"),
        ({"game": "mfg_crowd_modelling"}, ConfigError, "mean-field"),
        ({"game": "catch", "game_params": {"widgets": 3}}, ConfigError, "widgets"),
        ({"game": "tic_tac_toe", "agent_player": 2}, ConfigError, "between 0 and 1.*got 2"),
        ({"game": "tic_tac_toe", "opponent": "clever"}, ConfigError, "minimax, got 'clever'"),
        ({"game": "catch", "text_style": "poetry"}, ConfigError, "compact, rules, got 'poetry'"),
    ],
)
def test_bad_options_are_refused_with_the_way_out(options, error, message) -> None:
    with pytest.raises(error, match=message):
        make_environment(**options)


def test_the_state_says_what_is_played() -> None:
    environment = make_environment(game="kuhn_poker", game_params={"players": 3}, agent_player=1)
    environment.reset(seed=0, episode_id="mine")
    assert environment.state.model_dump() == {
        "episode_id": "mine",
        "step_count": 0,
        "game_name": "kuhn_poker",
        "agent_player": 1,
        "opponent_policy": "random",
        "game_params": {"players": 3},
        "num_players": 3,
    }


@pytest.mark.parametrize("game", ["blackjack", "catch", "kuhn_poker", "pig", "tic_tac_toe"])
def test_who_ends_above_nothing_has_won_and_a_draw_is_no_success(game) -> None:
    environment = make_environment(game=game)
    said = set()
    for seed in range(60):
        *before, last = play(environment, seed)
        total = sum(transition.reward or 0.0 for transition in (*before, last))
        assert {transition.success for transition in before} == {None}
        assert last.success is (total > 0)
        said.add(last.success)
    assert said == {True, False}


@pytest.mark.parametrize("game", ["2048", "cliff_walking"])
def test_a_game_without_losers_has_no_winners_either(game) -> None:
    *_, last = episode({"game": game}, seed=0)
    assert (last.terminated, last.success) == (True, None)


def test_a_deal_in_which_the_agent_never_moves_is_dealt_again() -> None:
    environment = make_environment(game="euchre")  # all may pass, or one may play alone
    for seed in range(40):
        observation = environment.reset(seed=seed).observation
        assert observation.legal_actions
        assert observation.current_player_id == 0


def test_games_that_think_long_do_not_block_the_event_loop() -> None:
    assert make_environment(game="blackjack").steps_on_event_loop
    assert not make_environment(game="tiny_bridge_2p").steps_on_event_loop


@pytest.mark.slow
def test_every_registered_game_plays_to_its_end_or_says_why_not() -> None:
    import pyspiel

    too_long = {"bridge", "bridge_uncontested_bidding", "colored_trails"}
    num_played = 0
    for kind in pyspiel.registered_games():
        if not kind.default_loadable or kind.short_name in too_long:
            continue
        try:
            environment = make_environment(game=kind.short_name, text_style="rules")
        except ConfigError:
            continue
        rng = random.Random(0)
        transition, num_steps = environment.reset(seed=0), 0
        while not transition.terminated and num_steps < 60:
            answers = environment.text_renderer.legal_answers(transition.observation)
            answer = rng.choice(answers)
            action = environment.text_renderer.parse(answer, transition.observation)
            assert transition.observation.legal_actions[answers.index(answer)] == action.action_id
            transition, num_steps = environment.step(action), num_steps + 1
        num_played += 1
    assert num_played > 95
