"""Tests of the opponent that uses Monte Carlo tree search."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ludus.proto.errors import ConfigError
from openspiel_env import OpenSpielAction, make_environment


def play_randomly(seed: int, **options: Any) -> tuple[list[int | None], float]:
    """Play random moves; return the opponent's moves and the player's return."""
    environment = make_environment(**options)
    transition, rng = environment.reset(seed=seed), random.Random(f"player {seed}")
    opponent_moves: list[int | None] = []
    episode_return = 0.0
    while not transition.terminated:
        action_id = rng.choice(transition.observation.legal_actions)
        transition = environment.step(OpenSpielAction(action_id=action_id))
        opponent_moves.append(transition.observation.opponent_last_action)
        episode_return += transition.reward or 0.0
    return opponent_moves, episode_return


def test_tree_search_beats_random_moves_in_connect_four() -> None:
    returns = [
        play_randomly(seed, game="connect_four", opponent="mcts(50)")[1] for seed in range(12)
    ]
    assert returns == [-1.0] * 12


def test_seed_determines_the_search() -> None:
    options = {"game": "tic_tac_toe", "opponent": "mcts(20)"}
    episode = play_randomly(3, **options)
    assert play_randomly(3, **options) == episode
    moves_by_seed = [play_randomly(seed, **options)[0] for seed in range(8)]
    assert len({tuple(moves) for moves in moves_by_seed}) > 1


def test_search_runs_off_the_event_loop() -> None:
    assert make_environment(game="connect_four").steps_on_event_loop
    assert not make_environment(game="connect_four", opponent="mcts").steps_on_event_loop


@pytest.mark.slow
@pytest.mark.parametrize("game", ["chess", "go(board_size=9)"])
def test_search_plays_chess_and_go(game: str) -> None:
    environment = make_environment(game=game, opponent="mcts(2)", text_style="rules")
    observation = environment.reset(seed=1).observation
    result = environment.step(OpenSpielAction(action_id=observation.legal_actions[0]))
    assert result.observation.opponent_last_action is not None


@pytest.mark.parametrize("opponent", ["mcts()", "mcts(0)", "mcts(999999)", "mcts(-1)", "mcts(2"])
def test_invalid_number_of_simulations_is_refused(opponent: str) -> None:
    with pytest.raises(ConfigError, match="1 to 100000 simulations per move"):
        make_environment(game="connect_four", opponent=opponent)


def test_search_opponent_is_invalid_for_games_with_hidden_cards() -> None:
    with pytest.raises(ConfigError, match="would see hidden cards"):
        make_environment(game="kuhn_poker", opponent="mcts")
