"""Exact solutions of small OpenSpiel games, against uniformly random players."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pyspiel

MoveProbabilities = Callable[[pyspiel.State], list[tuple[int, float]]]
"""Function from a state to the agent's moves and their probabilities."""


class GameValue(NamedTuple):
    """Expected results of a player."""

    expected_return: float
    win: float
    draw: float


def play_uniformly(state: pyspiel.State) -> list[tuple[int, float]]:
    """Return the legal moves with equal probabilities."""
    actions = state.legal_actions()
    return [(action, 1 / len(actions)) for action in actions]


def evaluate(game: pyspiel.Game, agent: int, policy: MoveProbabilities) -> GameValue:
    """Return the exact value of a policy, by enumeration of the whole game."""

    def compute_value(state: pyspiel.State) -> GameValue:
        if state.is_terminal():
            return _compute_final_value(state, agent)
        return _compute_mean(
            (probability, compute_value(state.child(action)))
            for action, probability in _list_moves(state, agent, policy)
        )

    return compute_value(game.new_initial_state())


def solve_perfect_information(game: pyspiel.Game, agent: int) -> dict[str, GameValue]:
    """Return the values of random and of optimal play, by dynamic programming over states."""

    def solve(is_optimal: bool) -> GameValue:
        values_by_state: dict[str, GameValue] = {}

        def compute_value(state: pyspiel.State) -> GameValue:
            if state.is_terminal():
                return _compute_final_value(state, agent)
            state_key = f"{state.current_player()} {state}"
            if state_key not in values_by_state:
                moves = _list_moves(state, agent, play_uniformly)
                weighted_values = [
                    (probability, compute_value(state.child(action)))
                    for action, probability in moves
                ]
                agent_chooses = is_optimal and state.current_player() == agent
                values_by_state[state_key] = (
                    max(game_value for _, game_value in weighted_values)
                    if agent_chooses
                    else _compute_mean(iter(weighted_values))
                )
            return values_by_state[state_key]

        return compute_value(game.new_initial_state())

    return {"random": solve(is_optimal=False), "optimal": solve(is_optimal=True)}


def solve_hidden_information(game: pyspiel.Game, agent: int) -> dict[str, GameValue]:
    """Return the values of random and of optimal play, by trying every deterministic strategy."""
    legal_actions = dict(sorted(_iterate_information_states(game.new_initial_state(), agent)))
    strategies = itertools.product(*legal_actions.values())
    best_value = max(
        evaluate(
            game, agent, _follow_strategy(dict(zip(legal_actions, strategy, strict=True)), agent)
        )
        for strategy in strategies
    )
    return {"random": evaluate(game, agent, play_uniformly), "optimal": best_value}


def _follow_strategy(strategy: Mapping[str, int], agent: int) -> MoveProbabilities:
    return lambda state: [(strategy[state.information_state_string(agent)], 1.0)]


def _iterate_information_states(
    state: pyspiel.State, agent: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if state.is_terminal():
        return
    if state.current_player() == agent:
        yield state.information_state_string(agent), tuple(state.legal_actions())
    for action in state.legal_actions():
        yield from _iterate_information_states(state.child(action), agent)


def _list_moves(
    state: pyspiel.State, agent: int, policy: MoveProbabilities
) -> list[tuple[int, float]]:
    if state.is_chance_node():
        return state.chance_outcomes()
    return policy(state) if state.current_player() == agent else play_uniformly(state)


def _compute_final_value(state: pyspiel.State, agent: int) -> GameValue:
    final_return = state.player_return(agent)
    return GameValue(final_return, float(final_return > 0), float(final_return == 0))


def _compute_mean(weighted_values: Iterator[tuple[float, GameValue]]) -> GameValue:
    products = [
        [probability * component for component in value] for probability, value in weighted_values
    ]
    return GameValue(*map(sum, zip(*products, strict=True)))
