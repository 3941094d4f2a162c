"""Monte Carlo tree search, which plays any game that hides nothing, and better the longer."""

from __future__ import annotations

import random

import pyspiel

_EXPLORATION = 2.0
_MAX_TREE_MB = 64


def search_move(
    game: pyspiel.Game, state: pyspiel.State, rng: random.Random, num_simulations: int
) -> int:
    """The move that a search of so many simulations finds; its seed is drawn from `rng`.

    UCT with random rollouts (Kocsis and Szepesvari, Bandit based Monte-Carlo planning, 2006), by
    OpenSpiel's implementation, which also proves wins and losses. A new tree for each move.
    """
    seed = rng.getrandbits(31)
    bot = pyspiel.MCTSBot(
        game,
        pyspiel.RandomRolloutEvaluator(1, seed),
        _EXPLORATION,
        num_simulations,
        _MAX_TREE_MB,
        True,  # solve: proven wins are played
        seed,
        False,
    )
    return int(bot.step(state))
