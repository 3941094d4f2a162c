"""Small OpenSpiel games solved exactly, against other players who choose uniformly at random."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pyspiel

Choose = Callable[[pyspiel.State], list[tuple[int, float]]]
"""The agent's moves in a state, each with how likely it is taken."""


class Value(NamedTuple):
    """What a player can expect."""

    expected_return: float
    win: float
    draw: float


def play_uniformly(state: pyspiel.State) -> list[tuple[int, float]]:
    """Every legal move, all equally likely."""
    actions = state.legal_actions()
    return [(action, 1 / len(actions)) for action in actions]


def evaluate(game: pyspiel.Game, agent: int, choose: Choose) -> Value:
    """The exact value of a policy, by walking through the whole game."""

    def value(state: pyspiel.State) -> Value:
        if state.is_terminal():
            return _at_the_end(state, agent)
        return _mean((p, value(state.child(action))) for action, p in _moves(state, agent, choose))

    return value(game.new_initial_state())


def solve_perfect_information(game: pyspiel.Game, agent: int) -> dict[str, Value]:
    """The values of random and of optimal play, each state being looked at once."""

    def solve(best: bool) -> Value:
        known: dict[str, Value] = {}

        def value(state: pyspiel.State) -> Value:
            if state.is_terminal():
                return _at_the_end(state, agent)
            key = f"{state.current_player()} {state}"
            if key not in known:
                moves = _moves(state, agent, play_uniformly)
                values = [(p, value(state.child(action))) for action, p in moves]
                agent_chooses = best and state.current_player() == agent
                known[key] = max(v for _, v in values) if agent_chooses else _mean(iter(values))
            return known[key]

        return value(game.new_initial_state())

    return {"random": solve(best=False), "optimal": solve(best=True)}


def solve_hidden_information(game: pyspiel.Game, agent: int) -> dict[str, Value]:
    """The values of random and of optimal play, by trying every deterministic strategy."""
    legal = dict(sorted(_information_states(game.new_initial_state(), agent)))
    strategies = itertools.product(*legal.values())
    best = max(
        evaluate(game, agent, _follow(dict(zip(legal, strategy, strict=True)), agent))
        for strategy in strategies
    )
    return {"random": evaluate(game, agent, play_uniformly), "optimal": best}


def _follow(strategy: Mapping[str, int], agent: int) -> Choose:
    return lambda state: [(strategy[state.information_state_string(agent)], 1.0)]


def _information_states(state: pyspiel.State, agent: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if state.is_terminal():
        return
    if state.current_player() == agent:
        yield state.information_state_string(agent), tuple(state.legal_actions())
    for action in state.legal_actions():
        yield from _information_states(state.child(action), agent)


def _moves(state: pyspiel.State, agent: int, choose: Choose) -> list[tuple[int, float]]:
    if state.is_chance_node():
        return state.chance_outcomes()
    return choose(state) if state.current_player() == agent else play_uniformly(state)


def _at_the_end(state: pyspiel.State, agent: int) -> Value:
    won = state.player_return(agent)
    return Value(won, float(won > 0), float(won == 0))


def _mean(values: Iterator[tuple[float, Value]]) -> Value:
    weighted = [[p * part for part in value] for p, value in values]
    return Value(*map(sum, zip(*weighted, strict=True)))
