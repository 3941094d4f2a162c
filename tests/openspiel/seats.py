"""Helpers that play OpenSpiel games in process and render their states."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pyspiel

from ludus.env import Transition
from openspiel_env import OpenSpielAction, OpenSpielObservation, make_environment
from openspiel_env.games import load_game
from openspiel_env.policies import SeatPolicy, play_random
from openspiel_env.seat_view import SeatView
from openspiel_env.server.openspiel_environment import OpenSpielEnvironment
from openspiel_env.text import make_renderer

RENDERED_GAMES = ("blackjack", "catch", "connect_four", "kuhn_poker", "tic_tac_toe")
"""Games with a game-specific renderer."""
EXPLAINED_GAMES = ("2048", "chess", "go(board_size=5)", "leduc_poker", "liars_dice")
"""Games whose renderer explains OpenSpiel's strings."""
GENERIC_GAMES = (*EXPLAINED_GAMES, "backgammon", "breakthrough", "goofspiel", "phantom_ttt")

HIT, STAND = 0, 1


def make_action(action_id: int) -> OpenSpielAction:
    return OpenSpielAction(action_id=action_id)


def play(
    environment: OpenSpielEnvironment, seed: int, policy: SeatPolicy = play_random
) -> Iterator[Transition[OpenSpielObservation]]:
    """Yield the transitions of one episode."""
    rng = random.Random(f"test {seed}")
    transition = environment.reset(seed=seed)
    yield transition
    while not transition.terminated:
        transition = environment.step(make_action(policy(transition.observation, rng)))
        yield transition


def play_episode(
    options: dict[str, Any], seed: int, policy: SeatPolicy = play_random
) -> list[Transition[OpenSpielObservation]]:
    return list(play(make_environment(**options), seed, policy))


def compute_returns(options: dict[str, Any], num_episodes: int, policy: SeatPolicy) -> list[float]:
    """Play seeds 0 to `num_episodes` - 1; return the sum of rewards of each episode."""
    environment = make_environment(**options)
    return [
        sum(transition.reward or 0.0 for transition in play(environment, seed, policy))
        for seed in range(num_episodes)
    ]


def render_state(
    game: str, moves: list[int], player: int = 0, style: Any = "compact", *, first: bool = True
) -> list[str]:
    """Return the messages that a player gets after these moves, which include chance moves."""
    loaded_game = load_game(game)
    state = loaded_game.game.new_initial_state()
    for action_id in moves:
        state.apply_action(action_id)
    renderer = make_renderer(loaded_game, player, style)
    observation = SeatView(loaded_game, player, adds_text=renderer.needs_text).observe(state)
    return [message["content"] for message in renderer.render(observation, first=first)]


def select_random_states(
    game: str, seed: int, is_selected: Callable[[pyspiel.State], bool]
) -> Iterator[pyspiel.State]:
    """Play one game with random moves; yield the states for which `is_selected` is true."""
    rng = random.Random(seed)
    state = pyspiel.load_game(game).new_initial_state()
    while not state.is_terminal():
        if is_selected(state):
            yield state
        state.apply_action(rng.choice(state.legal_actions()))
