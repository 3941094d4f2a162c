"""Options of the Atari environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from ludus.env.options import EnvironmentOptions

from .models import UNNAMED_GAME, ObsType
from .text import TextStyle


class AtariOptions(EnvironmentOptions):
    """A game, its observations and the limits of an episode."""

    variable_suffixes: ClassVar[Mapping[str, str]] = {
        "repeat_action_probability": "repeat_action_prob"  # OpenEnv's name
    }

    game: str = UNNAMED_GAME
    """Name in the Arcade Learning Environment, such as `space_invaders`."""
    obs_type: ObsType = "ram"
    """Content of `screen`: the memory (`ram`) or a picture (`rgb`, `grayscale`)."""
    lists_pixels: bool = False
    """Send pictures as lists of numbers, as OpenEnv's server does. Otherwise as tensors."""
    full_action_space: bool = False
    """Offer all 18 actions of the console. Otherwise only those with an effect in the game."""
    mode: int | None = None
    """Mode of the game. If not set, its first mode."""
    difficulty: int | None = None
    """Difficulty of the game. If not set, its first difficulty."""
    repeat_action_probability: float = Field(0.0, ge=0, lt=1)
    """Probability that a frame repeats the previous action."""
    frameskip: int = Field(4, ge=1)
    """Number of frames per decision."""
    max_waiting_frames: int = Field(30, ge=0)
    """Maximum number of frames before the first decision. The seed determines the number; the
    games have no other randomness."""
    max_turns: int = Field(0, ge=0)
    """Number of decisions after which an episode is truncated; 0 means no limit. A whole game of
    Pong takes 800 decisions or more, too many for one conversation."""
    max_scores: int = Field(0, ge=0)
    """Number of scores, of either side, after which an episode terminates; 0 means no limit."""
    text_style: TextStyle = "compact"
    """`compact` shows the situation only; `rules` explains the game."""
