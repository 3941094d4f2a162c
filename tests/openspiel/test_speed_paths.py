"""Tests that optimized code gives the same results as straightforward code."""

from __future__ import annotations

import json
import random
from collections import Counter

import pyspiel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.env.encoding import encode_transition
from ludus.env.types import Transition
from openspiel_env.chance import ChanceStream
from openspiel_env.games import BINARY_TENSOR_GAMES, load_game
from openspiel_env.models import OpenSpielObservation
from openspiel_env.seat_view import SeatView
from openspiel_env.server.openspiel_environment import build_environment
from openspiel_env.snapshots import SnapshotTransition
from tests.openspiel.seats import play

GAMES = sorted(BINARY_TENSOR_GAMES)


def play_episodes(game: str, num_episodes: int = 40) -> list[Transition[OpenSpielObservation]]:
    environment = build_environment(game=game)
    return [transition for seed in range(num_episodes) for transition in play(environment, seed)]


# -- observations as JSON ----------------------------------------------------------------


@pytest.mark.slow
@given(
    st.builds(
        OpenSpielObservation,
        metadata=st.dictionaries(st.text(), st.text() | st.integers(0, 9) | st.none()),
        info_state=st.lists(st.floats(width=32) | st.floats()),
        legal_actions=st.lists(st.integers(-(2**53), 2**53)),
        game_phase=st.sampled_from(["initial", "playing", "terminal"]),
        current_player_id=st.integers(-4, 9),
        opponent_last_action=st.none() | st.integers(0, 99),
    )
)
def test_observation_json_equals_pydantic_json(
    observation: OpenSpielObservation,
) -> None:
    assert observation.to_json() == observation.model_dump_json().encode()


@pytest.mark.parametrize("game", ["kuhn_poker", "leduc_poker", *GAMES])
def test_observations_built_without_validation_are_valid(game: str) -> None:
    for transition in play_episodes(game, num_episodes=5):
        fields = transition.observation.model_dump()
        observation = OpenSpielObservation.model_validate(fields)
        assert observation == transition.observation
        assert observation.model_fields_set == transition.observation.model_fields_set
        assert transition.observation.model_copy() == transition.observation


# -- observations stored as bytes ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_snapshot_json_equals_observation_json(game: str) -> None:
    for transition in play_episodes(game):
        assert isinstance(transition, SnapshotTransition)
        snapshot_json, _ = transition.encode_observation()
        assert snapshot_json == transition.observation.model_dump_json().encode()
        assert encode_transition(transition, None, 0).observation_json == snapshot_json


@pytest.mark.parametrize("game", GAMES)
def test_snapshot_transition_decodes_to_the_same_observation(game: str) -> None:
    loaded_game = load_game(game)
    view, rng = SeatView(loaded_game, 0), random.Random(3)
    pairs = []
    for _ in range(20):
        state = loaded_game.game.new_initial_state()
        while not state.is_terminal():
            if not state.is_chance_node():
                pairs.append((view.make_transition(state, "playing", None), view.observe(state)))
            state.apply_action(rng.choice(state.legal_actions()))
    assert len(pairs) > 20
    for transition, observation in pairs:
        assert transition.observation == observation


@pytest.mark.parametrize("game", GAMES)
def test_binary_games_have_binary_tensors(game: str) -> None:
    assert not load_game(game).game.get_type().provides_information_state_tensor
    values = {
        value for transition in play_episodes(game) for value in transition.observation.info_state
    }
    assert values == {0.0, 1.0}


def test_modified_observation_is_encoded_with_the_changes() -> None:
    transition = build_environment(game="blackjack").reset(seed=1)
    transition.observation.legal_actions = [1]
    observation_json, _ = transition.encode_observation()
    assert json.loads(observation_json)["legal_actions"] == [1]


# -- chance --------------------------------------------------------------------------------


def test_seed_determines_the_chance_stream() -> None:
    stream, equal_stream, other_stream = ChanceStream(7), ChanceStream(7), ChanceStream(8)
    numbers = [stream.random() for _ in range(50)]
    assert numbers == [equal_stream.random() for _ in range(50)]
    assert not set(numbers) & {other_stream.random() for _ in range(50)}
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.slow
def test_consecutive_seeds_pick_events_equally_often() -> None:
    events = list(range(13))
    num_draws = 13_000
    for num_skipped in (0, 9):  # draws from the first and the second block of numbers
        counts: Counter[int] = Counter()
        for seed in range(num_draws):
            stream = ChanceStream(seed)
            for _ in range(num_skipped):
                stream.random()
            counts[stream.pick_event(events)] += 1
        chi_square = sum((counts[event] - 1000) ** 2 / 1000 for event in events)
        assert chi_square < 32.9  # 99.9th percentile with 12 degrees of freedom


def test_pick_event_consumes_one_random_number() -> None:
    event_stream, number_stream = ChanceStream(5), ChanceStream(5)
    for _ in range(20):
        assert event_stream.pick_event(list(range(52))) == int(number_stream.random() * 52)


def test_dealt_cards_are_distinct() -> None:
    state = pyspiel.load_game("blackjack").new_initial_state()
    stream, cards = ChanceStream(0), []
    while state.is_chance_node():
        cards.append(stream.pick_event(state.legal_actions()))
        state.apply_action(cards[-1])
    assert len(set(cards)) == len(cards) == 4
