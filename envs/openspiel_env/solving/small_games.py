"""Solve small OpenSpiel games exactly, against uniformly random players."""

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
    """Return the legal moves, all equally likely."""
    actions = state.legal_actions()
    return [(action, 1 / len(actions)) for action in actions]


def evaluate(game: pyspiel.Game, agent: int, choose: MoveProbabilities) -> GameValue:
    """Return the exact value of a policy, by enumeration of the whole game."""

    def value(state: pyspiel.State) -> GameValue:
        if state.is_terminal():
            return _final_value(state, agent)
        return _mean((p, value(state.child(action))) for action, p in _moves(state, agent, choose))

    return value(game.new_initial_state())


def solve_perfect_information(game: pyspiel.Game, agent: int) -> dict[str, GameValue]:
    """Return the values of random and of optimal play, by dynamic programming over states."""

    def solve(is_optimal: bool) -> GameValue:
        values_by_state: dict[str, GameValue] = {}

        def value(state: pyspiel.State) -> GameValue:
            if state.is_terminal():
                return _final_value(state, agent)
            key = f"{state.current_player()} {state}"
            if key not in values_by_state:
                moves = _moves(state, agent, play_uniformly)
                values = [(p, value(state.child(action))) for action, p in moves]
                agent_chooses = is_optimal and state.current_player() == agent
                values_by_state[key] = (
                    max(result for _, result in values) if agent_chooses else _mean(iter(values))
                )
            return values_by_state[key]

        return value(game.new_initial_state())

    return {"random": solve(is_optimal=False), "optimal": solve(is_optimal=True)}


def solve_hidden_information(game: pyspiel.Game, agent: int) -> dict[str, GameValue]:
    """Return the values of random and of optimal play, by trying every deterministic strategy."""
    legal_actions = dict(sorted(_information_states(game.new_initial_state(), agent)))
    strategies = itertools.product(*legal_actions.values())
    best = max(
        evaluate(game, agent, _follow(dict(zip(legal_actions, strategy, strict=True)), agent))
        for strategy in strategies
    )
    return {"random": evaluate(game, agent, play_uniformly), "optimal": best}


def _follow(strategy: Mapping[str, int], agent: int) -> MoveProbabilities:
    return lambda state: [(strategy[state.information_state_string(agent)], 1.0)]


def _information_states(state: pyspiel.State, agent: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if state.is_terminal():
        return
    if state.current_player() == agent:
        yield state.information_state_string(agent), tuple(state.legal_actions())
    for action in state.legal_actions():
        yield from _information_states(state.child(action), agent)


def _moves(state: pyspiel.State, agent: int, choose: MoveProbabilities) -> list[tuple[int, float]]:
    if state.is_chance_node():
        return state.chance_outcomes()
    return choose(state) if state.current_player() == agent else play_uniformly(state)


def _final_value(state: pyspiel.State, agent: int) -> GameValue:
    score = state.player_return(agent)
    return GameValue(score, float(score > 0), float(score == 0))


def _mean(values: Iterator[tuple[float, GameValue]]) -> GameValue:
    weighted = [[p * part for part in value] for p, value in values]
    return GameValue(*map(sum, zip(*weighted, strict=True)))
