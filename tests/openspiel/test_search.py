"""Tree search as an opponent: strong, repeatable, and refused where it would see hidden cards."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ludus.proto.errors import ConfigError
from openspiel_env import OpenSpielAction, make_environment


def game_of(seed: int, **options: Any) -> tuple[list[int | None], float]:
    """What the opponent played against random moves, and the player's return."""
    environment = make_environment(**options)
    result, rng = environment.reset(seed=seed), random.Random(f"player {seed}")
    replies: list[int | None] = []
    total = 0.0
    while not result.terminated:
        move = rng.choice(result.observation.legal_actions)
        result = environment.step(OpenSpielAction(action_id=move))
        replies.append(result.observation.opponent_last_action)
        total += result.reward or 0.0
    return replies, total


def test_tree_search_beats_random_moves_in_connect_four() -> None:
    returns = [game_of(seed, game="connect_four", opponent="mcts(50)")[1] for seed in range(12)]
    assert returns == [-1.0] * 12


def test_a_search_follows_from_the_seed_and_more_simulations_are_another_one() -> None:
    options = {"game": "tic_tac_toe", "opponent": "mcts(20)"}
    first = game_of(3, **options)
    assert game_of(3, **options) == first
    others = [game_of(seed, **options)[0] for seed in range(8)]
    assert len({tuple(replies) for replies in others}) > 1


def test_an_opponent_that_searches_keeps_off_the_event_loop() -> None:
    assert make_environment(game="connect_four").steps_on_event_loop
    assert not make_environment(game="connect_four", opponent="mcts").steps_on_event_loop


@pytest.mark.slow
@pytest.mark.parametrize("game", ["chess", "go(board_size=9)"])
def test_chess_and_go_are_played_against_a_search_of_few_simulations(game: str) -> None:
    environment = make_environment(game=game, opponent="mcts(2)", text_style="rules")
    observation = environment.reset(seed=1).observation
    result = environment.step(OpenSpielAction(action_id=observation.legal_actions[0]))
    assert result.observation.opponent_last_action is not None


@pytest.mark.parametrize("opponent", ["mcts()", "mcts(0)", "mcts(999999)", "mcts(-1)", "mcts(2"])
def test_a_search_of_no_length_is_refused(opponent: str) -> None:
    with pytest.raises(ConfigError, match="1 to 100000 simulations a move"):
        make_environment(game="connect_four", opponent=opponent)


def test_a_search_that_would_see_hidden_cards_is_refused() -> None:
    with pytest.raises(ConfigError, match="without hidden cards"):
        make_environment(game="kuhn_poker", opponent="mcts")
