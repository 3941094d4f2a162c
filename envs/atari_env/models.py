"""What travels between an Atari server and its players; OpenEnv's fields, and a few more."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ludus.env import Action, Observation, State

UNNAMED_GAME = "pong"
"""OpenEnv's clients send this game name when their user named none, whatever is played."""

ObsType = Literal["ram", "rgb", "grayscale"]
UNNAMED_OBS_TYPE: ObsType = "rgb"
"""The same for the type of observation."""


class AtariAction(Action):
    """One decision; it holds for as many frames as the server's `frameskip` says."""

    action_id: int
    """One of the observation's `legal_actions`."""
    game_name: str = UNNAMED_GAME
    """The game it is meant for; the default stands for the one that is played."""
    obs_type: ObsType = UNNAMED_OBS_TYPE
    """What the player expects to see; the default stands for what is sent."""
    full_action_space: bool = False
    """True is for a server that offers all 18 actions of the console."""


class AtariObservation(Observation):
    """What the player sees after its decision."""

    screen: list[int] | dict[str, Any] | None
    """With `ram`, the console's 128 bytes of memory. Pictures travel beside it, as the tensor
    `screen`; OpenEnv's own clients have them here, as a list with `lists_pixels`, else as
    {"dtype", "shape", "data"} with the bytes in base64."""
    screen_shape: list[int]
    """[128], [210, 160, 3] or [210, 160]."""
    legal_actions: list[int]
    """Numbers of the actions; empty at the end."""
    action_names: list[str]
    """The name of each action by its number, the console's own: in Pong, RIGHT is up."""
    score: float = 0.0
    """Points since the reset, those of an opponent taken off."""
    lives: int = 0
    """Lives left; 0 in games that have none."""
    episode_frame_number: int = 0
    """Frames since the reset."""
    frame_number: int = 0
    """The same: an episode shows nothing of those before it."""
    memory: list[int] = Field(default_factory=list)
    """The 128 bytes of the console's memory; empty where `screen` holds them."""
    facts: dict[str, int] = Field(default_factory=dict)
    """What is where, by name, read from the memory; empty for games whose memory nobody knows."""


class AtariState(State):
    """Where the episode stands, and what is played."""

    game_name: str = UNNAMED_GAME
    obs_type: ObsType = "ram"
    full_action_space: bool = False
    mode: int | None = None
    difficulty: int | None = None
    repeat_action_probability: float = 0.0
    frameskip: int = 4
    episode_return: float = 0.0
