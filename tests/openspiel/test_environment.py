"""Tests of OpenSpiel games as an environment: seeds, rewards, opponents and invalid calls."""

from __future__ import annotations

import functools
import random
from typing import Any

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
    GENERIC_GAMES,
    HIT,
    RENDERED_GAMES,
    STAND,
    make_action,
    play,
    play_episode,
    select_random_states,
)

UP_CARD = slice(33, 85)
PLAYER_HAND = slice(85, 137)
DEALER_HAND = slice(137, 189)


def read_cards(observation: OpenSpielObservation, hand: slice) -> set[int]:
    return {card for card, value in enumerate(observation.info_state[hand]) if value}


# -- the contract ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("text_style", ["compact", "rules"])
@pytest.mark.parametrize("game", [*RENDERED_GAMES, *GENERIC_GAMES])
def test_environment_satisfies_the_contract(game: str, text_style: str) -> None:
    factory = functools.partial(make_environment, game=game, text_style=text_style)
    check_environment(factory, seeds=range(3), num_steps=12).raise_if_failed()


@pytest.mark.parametrize("game", ["blackjack", "leduc_poker", "negotiation"])
def test_seed_determines_the_episode(game: str) -> None:
    episode = play_episode({"game": game}, seed=5)
    random.seed(99)
    assert play_episode({"game": game}, seed=5) == episode
    assert any(episode != play_episode({"game": game}, seed=seed) for seed in range(6, 10))


def test_episodes_without_a_seed_differ() -> None:
    environment = make_environment(game="blackjack")
    deals = {tuple(environment.reset().observation.info_state) for _ in range(20)}
    assert len(deals) > 10


# -- one seed, one deal ----------------------------------------------------------------


def test_moves_do_not_change_the_cards() -> None:
    environment = make_environment(game="blackjack")
    num_comparisons = 0
    for seed in range(60):
        deal = environment.reset(seed=seed).observation
        stand_observation = environment.step(make_action(STAND)).observation
        assert environment.reset(seed=seed).observation == deal
        hit_observation = environment.step(make_action(HIT)).observation
        player_cards = read_cards(hit_observation, PLAYER_HAND) - read_cards(deal, PLAYER_HAND)
        dealer_cards = read_cards(stand_observation, DEALER_HAND)
        if len(dealer_cards) == 3:  # the dealer drew the card that the player draws after a hit
            assert player_cards < dealer_cards
            num_comparisons += 1
    assert num_comparisons > 10


def test_opponents_do_not_change_the_cards() -> None:
    def read_public_cards(opponent: str) -> dict[int, str]:
        options = {"game": "leduc_poker", "opponent": opponent}
        cards_by_seed = {}
        for seed in range(40):
            last_transition = play_episode(options, seed, lambda observation, rng: 1)[-1]  # 1 calls
            _, _, public_card = last_transition.observation.metadata["view"].partition("[Public: ")
            if public_card:
                cards_by_seed[seed] = public_card[0]
        return cards_by_seed

    random_cards, last_cards = read_public_cards("random"), read_public_cards("last")
    seeds = random_cards.keys() & last_cards.keys()
    assert [random_cards[seed] for seed in seeds] == [last_cards[seed] for seed in seeds]
    assert len(seeds) > 15
    assert len(set(last_cards.values())) == 6


@pytest.mark.parametrize("game", sorted(UNIFORM_CHANCE_GAMES))
def test_uniform_chance_games_have_equally_likely_events(game: str) -> None:
    num_events = 0
    for seed in range(30):
        for state in select_random_states(game, seed, lambda state: state.is_chance_node()):
            events, probabilities = zip(*state.chance_outcomes(), strict=True)
            assert list(events) == state.legal_actions()
            assert probabilities == pytest.approx([1 / len(events)] * len(events))
            num_events += 1
    assert num_events >= 30


@pytest.mark.slow
def test_weighted_draws_follow_the_probabilities_of_the_game() -> None:
    state = load_game("2048").game.new_initial_state()
    probabilities = dict(state.chance_outcomes())
    assert len(set(probabilities.values())) > 1
    rng = random.Random(0)
    draws = [draw_weighted(state, rng) for _ in range(20_000)]
    for event in list(probabilities)[:4]:
        probability = probabilities[event]
        margin = 4 * (probability * (1 - probability) / len(draws)) ** 0.5
        assert draws.count(event) / len(draws) == pytest.approx(probability, abs=margin)


def test_weighted_draw_tolerates_rounding() -> None:
    class ChanceState:
        def chance_outcomes(self) -> list[tuple[int, float]]:
            return [(3, 0.3), (5, 0.6999999), (9, 0.0)]

    class MaxRandom(random.Random):
        def random(self) -> float:
            return 0.99999999

    assert draw_weighted(ChanceState(), MaxRandom()) == 5


# -- rewards, seats and opponents ------------------------------------------------------


def test_reward_includes_points_from_opponent_moves() -> None:
    for seat in (0, 1):
        transitions = play_episode({"game": "cribbage", "agent_player": seat}, seed=3)
        episode_return = sum(transition.reward for transition in transitions[1:])
        scores = transitions[-1].observation.metadata["view"].partition("Scores: ")[2].split()
        winner_bonus = 1000
        assert episode_return % winner_bonus == int(scores[seat])
        assert sum(transition.reward != 0 for transition in transitions[1:]) > 10


def test_seats_of_a_zero_sum_game_get_opposite_rewards() -> None:
    for seed in range(20):
        first_seat_transitions = play_episode(
            {"game": "tic_tac_toe", "opponent": "first"},
            seed,
            lambda observation, rng: observation.legal_actions[-1],
        )
        second_seat_transitions = play_episode(
            {"game": "tic_tac_toe", "opponent": "last", "agent_player": 1},
            seed,
            lambda observation, rng: observation.legal_actions[0],
        )
        assert first_seat_transitions[-1].reward == -second_seat_transitions[-1].reward != 0


def test_second_seat_sees_the_first_move() -> None:
    observation = make_environment(game="tic_tac_toe", agent_player=1).reset(seed=0).observation
    assert observation.opponent_last_action is not None
    assert observation.opponent_last_action not in observation.legal_actions
    assert observation.current_player_id == 1
    assert observation.game_phase == "initial"


@pytest.mark.parametrize(("opponent", "expected_move"), [("first", 0), ("middle", 5), ("last", 8)])
def test_simple_opponents_pick_the_expected_move(opponent: str, expected_move: int) -> None:
    environment = make_environment(game="tic_tac_toe", opponent=opponent)
    environment.reset(seed=0)
    observation = environment.step(make_action(4)).observation
    assert observation.opponent_last_action == expected_move  # legal: 0, 1, 2, 3, 5, 6, 7, 8
    assert observation.game_phase == "playing"


def test_custom_policy_plays_the_opponent_seat() -> None:
    observations: list[OpenSpielObservation] = []

    def record_and_play_first_move(observation: OpenSpielObservation, rng: random.Random) -> int:
        observations.append(observation)
        return observation.legal_actions[0]

    environment = make_environment(
        game="kuhn_poker", opponent=functools.partial(record_and_play_first_move)
    )
    assert environment.state.opponent_policy == "partial"
    environment = make_environment(game="kuhn_poker", opponent=record_and_play_first_move)
    for _ in play(environment, seed=1):
        pass
    assert environment.state.opponent_policy == "record_and_play_first_move"
    assert observations
    assert all(observation.info_state[:2] == [0.0, 1.0] for observation in observations)


def test_illegal_opponent_move_raises_execution_error() -> None:
    environment = make_environment(game="tic_tac_toe", opponent=lambda observation, rng: 99)
    environment.reset(seed=0)
    with pytest.raises(ExecutionError, match=r"must return a legal move.*99"):
        environment.step(make_action(0))
    with pytest.raises(EpisodeStateError):
        environment.step(make_action(1))


def test_hidden_moves_are_not_in_the_observation() -> None:
    for game in ("phantom_ttt", "goofspiel"):
        for transition in play_episode({"game": game}, seed=2):
            assert transition.observation.opponent_last_action is None
    transitions = play_episode({"game": "kuhn_poker"}, seed=2)
    moves = [transition.observation.opponent_last_action for transition in transitions]
    assert moves[0] is None
    assert any(action_id is not None for action_id in moves)


def test_simultaneous_moves_become_turns() -> None:
    environment = make_environment(game="goofspiel")
    assert environment.options["sequential_form"] == "turn_based_simultaneous_game"
    assert environment.state.num_players == 2
    assert "sequential_form" not in make_environment(game="tic_tac_toe").options


# -- invalid calls -------------------------------------------------------


def test_illegal_action_does_not_change_the_state() -> None:
    expected = play_episode({"game": "tic_tac_toe"}, seed=4)
    environment = make_environment(game="tic_tac_toe")
    transitions = []
    for transition in play(environment, seed=4):
        transitions.append(transition)
        if transition.terminated:
            break
        state = environment.state
        taken_cells = set(range(9)) - set(transition.observation.legal_actions)
        for action_id in [*taken_cells, -1, 9, 2**40]:
            with pytest.raises(IllegalActionError, match=r"one of \d \(x\(") as exc_info:
                environment.step(make_action(action_id))
            assert str(action_id) in exc_info.value.message
        assert environment.state == state
    assert transitions == expected


def test_steps_outside_an_episode_are_refused() -> None:
    environment = make_environment(game="blackjack")
    with pytest.raises(EpisodeStateError) as exc_info:
        environment.step(make_action(STAND))
    assert exc_info.value.code == ErrorCode.NOT_RESET
    environment.reset(seed=0)
    environment.step(make_action(STAND))
    with pytest.raises(EpisodeStateError, match="1 steps") as exc_info:
        environment.step(make_action(STAND))
    assert exc_info.value.code == ErrorCode.EPISODE_OVER


def test_move_for_another_game_is_refused() -> None:
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
        ({"game": "xyzzy"}, NotFoundError, "ludus env list"),
        ({"game": "crossword"}, ConfigError, "structures"),
        ({"game": "mfg_crowd_modelling"}, ConfigError, "mean-field"),
        ({"game": "catch", "game_params": {"widgets": 3}}, ConfigError, "widgets"),
        ({"game": "tic_tac_toe", "agent_player": 2}, ConfigError, "at most 1.*got 2"),
        ({"game": "tic_tac_toe", "opponent": "clever"}, ConfigError, "'clever'.*minimax"),
        (
            {"game": "catch", "text_style": "poetry"},
            ConfigError,
            "'brief', got 'poetry'",
        ),
    ],
)
def test_invalid_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_environment(**options)


def test_state_describes_the_game() -> None:
    environment = make_environment(game="kuhn_poker", game_params={"players": 3}, agent_player=1)
    environment.reset(seed=0, episode_id="episode 1")
    assert environment.state.model_dump() == {
        "episode_id": "episode 1",
        "step_count": 0,
        "game_name": "kuhn_poker",
        "agent_player": 1,
        "opponent_policy": "random",
        "game_params": {"players": 3},
        "num_players": 3,
    }


@pytest.mark.slow
@pytest.mark.parametrize("game", ["blackjack", "catch", "kuhn_poker", "pig", "tic_tac_toe"])
def test_success_is_a_positive_return(game: str) -> None:
    environment = make_environment(game=game)
    successes = set()
    for seed in range(60):
        *transitions, last_transition = play(environment, seed)
        episode_return = sum(
            transition.reward or 0.0 for transition in (*transitions, last_transition)
        )
        assert {transition.success for transition in transitions} == {None}
        assert last_transition.success is (episode_return > 0)
        successes.add(last_transition.success)
    assert successes == {True, False}


@pytest.mark.parametrize("game", ["2048", "cliff_walking"])
def test_game_without_losses_does_not_report_success(game: str) -> None:
    *_, last_transition = play_episode({"game": game}, seed=0)
    assert (last_transition.terminated, last_transition.success) == (True, None)


def test_reset_redeals_until_the_agent_has_a_move() -> None:
    environment = make_environment(game="euchre")  # a deal may end before the agent's first move
    for seed in range(40):
        observation = environment.reset(seed=seed).observation
        assert observation.legal_actions
        assert observation.current_player_id == 0


def test_slow_games_run_off_the_event_loop() -> None:
    assert make_environment(game="blackjack").steps_on_event_loop
    assert not make_environment(game="tiny_bridge_2p").steps_on_event_loop


@pytest.mark.slow
def test_registered_games_can_be_played() -> None:
    import pyspiel

    slow_games = {"bridge", "bridge_uncontested_bidding", "colored_trails"}
    num_games = 0
    for game_type in pyspiel.registered_games():
        if not game_type.default_loadable or game_type.short_name in slow_games:
            continue
        try:
            environment = make_environment(game=game_type.short_name, text_style="rules")
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
        num_games += 1
    assert num_games > 95
