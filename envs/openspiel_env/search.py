"""Monte Carlo tree search, for games without hidden information."""

from __future__ import annotations

import random

import pyspiel

_EXPLORATION = 2.0
_MAX_TREE_MB = 64


def search_move(
    game: pyspiel.Game, state: pyspiel.State, rng: random.Random, num_simulations: int
) -> int:
    """Return the move that a search with `num_simulations` finds. `rng` seeds the search.

    The search is UCT with random rollouts (Kocsis and Szepesvari, Bandit based Monte-Carlo
    planning, 2006), in OpenSpiel's implementation, which also proves wins and losses. Each move
    starts with a new tree.
    """
    seed = rng.getrandbits(31)
    bot = pyspiel.MCTSBot(
        game,
        pyspiel.RandomRolloutEvaluator(1, seed),
        _EXPLORATION,
        num_simulations,
        _MAX_TREE_MB,
        True,  # solve: play proven wins
        seed,
        False,
    )
    return int(bot.step(state))
