"""What is written or drawn a cheaper way is the same as what the plain way gives."""

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


def transitions(game: str, num_episodes: int = 40) -> list[Transition[OpenSpielObservation]]:
    environment = build_environment(game)
    return [step for seed in range(num_episodes) for step in play(environment, seed)]


# -- observations as JSON ----------------------------------------------------------------


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
def test_an_observation_writes_the_json_that_pydantic_would(
    observation: OpenSpielObservation,
) -> None:
    assert observation.to_json() == observation.model_dump_json().encode()


@pytest.mark.parametrize("game", ["kuhn_poker", "leduc_poker", *GAMES])
def test_observations_made_without_validation_are_valid_and_complete(game: str) -> None:
    for transition in transitions(game, num_episodes=5):
        dumped = transition.observation.model_dump()
        validated = OpenSpielObservation.model_validate(dumped)
        assert validated == transition.observation
        assert validated.model_fields_set == transition.observation.model_fields_set
        assert transition.observation.model_copy() == transition.observation


# -- observations kept as bytes ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_a_snapshot_travels_as_the_observation_it_stands_for(game: str) -> None:
    for transition in transitions(game):
        assert isinstance(transition, SnapshotTransition)
        unseen, _ = transition.encoded_observation()
        seen = transition.observation
        assert unseen == seen.model_dump_json().encode()
        assert encode_transition(transition, None, 0).observation_json == unseen


@pytest.mark.parametrize("game", GAMES)
def test_a_snapshot_holds_what_the_tensor_held_when_it_was_taken(game: str) -> None:
    loaded = load_game(game)
    view, rng = SeatView(loaded, 0), random.Random(3)
    kept = []
    for _ in range(20):
        state = loaded.game.new_initial_state()
        while not state.is_terminal():
            if not state.is_chance_node():
                kept.append((view.transition(state, "playing", None), view.observe(state)))
            state.apply_action(rng.choice(state.legal_actions()))
    assert len(kept) > 20
    for transition, observation in kept:
        assert transition.observation == observation


@pytest.mark.parametrize("game", GAMES)
def test_games_kept_as_bytes_have_tensors_of_zeros_and_ones(game: str) -> None:
    assert not load_game(game).game.get_type().provides_information_state_tensor
    values = {v for transition in transitions(game) for v in transition.observation.info_state}
    assert values == {0.0, 1.0}


def test_a_changed_observation_travels_as_it_was_changed() -> None:
    transition = build_environment("blackjack").reset(seed=1)
    transition.observation.legal_actions = [1]
    observation_json, _ = transition.encoded_observation()
    assert json.loads(observation_json)["legal_actions"] == [1]


# -- chance --------------------------------------------------------------------------------


def test_a_chance_stream_follows_from_its_seed_alone() -> None:
    first, again, other = ChanceStream(7), ChanceStream(7), ChanceStream(8)
    numbers = [first.random() for _ in range(50)]
    assert numbers == [again.random() for _ in range(50)]
    assert not set(numbers) & {other.random() for _ in range(50)}
    assert all(0 <= number < 1 for number in numbers)


def test_neighbouring_seeds_pick_every_event_equally_often() -> None:
    events = list(range(13))
    num_draws = 13_000
    for place in (0, 9):  # in the first block of numbers, and in the second
        picked: Counter[int] = Counter()
        for seed in range(num_draws):
            stream = ChanceStream(seed)
            for _ in range(place):
                stream.random()
            picked[stream.pick(events)] += 1
        chi_square = sum((picked[event] - 1000) ** 2 / 1000 for event in events)
        assert chi_square < 32.9  # exceeded once in a thousand times with 12 degrees of freedom


def test_a_pick_takes_exactly_one_number() -> None:
    one, other = ChanceStream(5), ChanceStream(5)
    for _ in range(20):
        picked, number = one.pick(list(range(52))), other.random()
        assert picked == int(number * 52)


def test_chance_moves_of_one_deal_are_all_different_cards() -> None:
    state = pyspiel.load_game("blackjack").new_initial_state()
    stream, dealt = ChanceStream(0), []
    while state.is_chance_node():
        dealt.append(stream.pick(state.legal_actions()))
        state.apply_action(dealt[-1])
    assert len(set(dealt)) == len(dealt) == 4
