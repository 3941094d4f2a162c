"""Messages between an atari_env server and its players: OpenEnv's fields and a few more."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ludus.env import Action, Observation, State

UNNAMED_GAME = "pong"
"""Game name that OpenEnv's clients send if the user names no game."""

ObsType = Literal["ram", "rgb", "grayscale"]
UNNAMED_OBS_TYPE: ObsType = "rgb"
"""Observation type that OpenEnv's clients send if the user names no type."""


class AtariAction(Action):
    """One decision. The server repeats it for `frameskip` frames."""

    action_id: int
    """An element of the observation's `legal_actions`."""
    game_name: str = UNNAMED_GAME
    """Game that the action is for. The default means the session's game."""
    obs_type: ObsType = UNNAMED_OBS_TYPE
    """Type of observation that the player expects. The default means the session's type."""
    full_action_space: bool = False
    """True if the action is for a server that offers all 18 actions."""


class AtariObservation(Observation):
    """The game after a decision."""

    screen: list[int] | dict[str, Any] | None
    """The console's 128 bytes of memory for the type `ram`. A picture is the tensor `screen` of the
    result instead. OpenEnv's clients get the picture here: as a list with `lists_pixels`,
    otherwise as {"dtype", "shape", "data"} with base64 data."""
    screen_shape: list[int]
    """[128], [210, 160, 3] or [210, 160]."""
    legal_actions: list[int]
    """Action ids; empty at the end."""
    action_names: list[str]
    """Name of each action on the console, by action id. In Pong, RIGHT is up."""
    score: float = 0.0
    """Points since the reset, minus the opponent's points."""
    lives: int = 0
    """Remaining lives; 0 in games without lives."""
    episode_frame_number: int = 0
    """Number of frames since the reset."""
    frame_number: int = 0
    """Equal to `episode_frame_number`."""
    memory: list[int] = Field(default_factory=list)
    """The 128 bytes of the console's memory; empty if `screen` contains them."""
    facts: dict[str, int] = Field(default_factory=dict)
    """Positions read from the memory, by name; empty for games with an unknown memory layout."""


class AtariState(State):
    """State of the episode, and the game."""

    game_name: str = UNNAMED_GAME
    obs_type: ObsType = "ram"
    full_action_space: bool = False
    mode: int | None = None
    difficulty: int | None = None
    repeat_action_probability: float = 0.0
    frameskip: int = 4
    episode_return: float = 0.0
