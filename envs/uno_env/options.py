"""Options of the Uno environment."""

from __future__ import annotations

from pydantic import Field

from ludus.env.options import EnvironmentOptions

from .policies import OpponentName
from .text import TextStyle


class UnoOptions(EnvironmentOptions):
    """Players, length of an episode and text."""

    num_players: int = Field(2, ge=2, le=10)
    """Number of players."""
    opponent: OpponentName = "random"
    """Policy of the other seats: `random` or `greedy`."""
    max_turns: int = Field(100, ge=1, le=1000)
    """Number of the player's moves after which the episode is truncated."""
    text_style: TextStyle = "compact"
    """`compact` shows the cards only; `rules` explains the game."""
