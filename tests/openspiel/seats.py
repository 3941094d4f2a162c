"""Playing games in process, for the tests beside this file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pyspiel

from ludus.env import Transition
from openspiel_env import OpenSpielAction, OpenSpielObservation, make_environment
from openspiel_env.games import load_game
from openspiel_env.policies import Policy, play_random
from openspiel_env.seat_view import SeatView
from openspiel_env.server.openspiel_environment import OpenSpielEnvironment
from openspiel_env.text import make_renderer

OWN_FACE_GAMES = ("blackjack", "catch", "connect_four", "kuhn_poker", "tic_tac_toe")
OTHER_GAMES = ("backgammon", "chess", "goofspiel", "leduc_poker", "phantom_ttt")

HIT, STAND = 0, 1


def move(action_id: int) -> OpenSpielAction:
    return OpenSpielAction(action_id=action_id)


def play(
    environment: OpenSpielEnvironment, seed: int, policy: Policy = play_random
) -> Iterator[Transition[OpenSpielObservation]]:
    """All transitions of one episode."""
    rng = random.Random(f"test {seed}")
    transition = environment.reset(seed=seed)
    yield transition
    while not transition.terminated:
        transition = environment.step(move(policy(transition.observation, rng)))
        yield transition


def episode(
    options: dict[str, Any], seed: int, policy: Policy = play_random
) -> list[Transition[OpenSpielObservation]]:
    return list(play(make_environment(**options), seed, policy))


def final_returns(options: dict[str, Any], num_games: int, policy: Policy) -> list[float]:
    """The return of one game per seed, from 0."""
    environment = make_environment(**options)
    return [
        sum(transition.reward or 0.0 for transition in play(environment, seed, policy))
        for seed in range(num_games)
    ]


def shown(game: str, moves: list[int], player: int = 0, style: Any = "compact") -> list[str]:
    """What the player is shown after these moves, those of chance included."""
    loaded = load_game(game)
    state = loaded.game.new_initial_state()
    for action_id in moves:
        state.apply_action(action_id)
    renderer = make_renderer(loaded, player, style)
    observation = SeatView(loaded, player, adds_text=renderer.needs_text).observe(state)
    return [message["content"] for message in renderer.render(observation, first=True)]


def random_states(
    game: str, seed: int, wanted: Callable[[pyspiel.State], bool]
) -> Iterator[pyspiel.State]:
    """The states of one game of random moves that are wanted."""
    rng = random.Random(seed)
    state = pyspiel.load_game(game).new_initial_state()
    while not state.is_terminal():
        if wanted(state):
            yield state
        state.apply_action(rng.choice(state.legal_actions()))
