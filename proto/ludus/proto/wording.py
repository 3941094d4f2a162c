"""The words for the outcomes of episodes: games are won, drawn or lost, tasks are solved or not.

An environment declares that it is a game. Records of runs contain this declaration, and every text
about outcomes takes its words from here. Names in files and metrics, such as `win_rate`, are the
same for all environments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wording:
    """The words for the episodes of one environment, or of several in the same table."""

    success: str
    """Word before or after the share of successful episodes: "wins 40%", "40% wins"."""
    success_rate: str
    """Name of the share of successful episodes."""
    has_draws: bool
    """True if an episode can be drawn."""


GAMES = Wording("wins", "win rate", has_draws=True)
TASKS = Wording("solved", "solve rate", has_draws=False)
MIXED = Wording("success", "success rate", has_draws=True)
"""Words for games and tasks together."""


def choose_wording(*games: bool) -> Wording:
    """Return the words for environments, given whether each of them is a game."""
    if len(set(games)) > 1:
        return MIXED
    return GAMES if all(games) else TASKS
