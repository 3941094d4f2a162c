"""Messages between an openspiel_env server and its players, with OpenEnv's fields."""

from __future__ import annotations

import functools
from typing import Any, Literal, Self

import orjson
from pydantic import Field

from ludus.env import Action, Observation, State

UNNAMED_GAME = "catch"
"""Game name that OpenEnv's clients send if the user names no game."""

GamePhase = Literal["initial", "playing", "terminal"]

_MAX_CACHED_BYTES = 64
_MAX_CACHED_ACTIONS = 4096

_set_attribute = object.__setattr__


class OpenSpielAction(Action):
    """One move of the agent."""

    action_id: int
    """An element of the observation's `legal_actions`."""
    game_name: str = UNNAMED_GAME
    """Game that the move is for. The default means the session's game."""
    game_params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the game that the move is for. The default means the session's."""

    @classmethod
    def from_json(cls, action_json: bytes) -> OpenSpielAction:
        """Parse a move. Parsed moves are cached, because a game has few and they never change."""
        if cls is OpenSpielAction and len(action_json) <= _MAX_CACHED_BYTES:
            return _parse_cached_action(action_json)
        return super().from_json(action_json)


class OpenSpielObservation(Observation):
    """The game as the agent's seat sees it."""

    info_state: list[float]
    """OpenSpiel's information-state tensor, or its observation tensor, flattened; empty if the
    game has neither."""
    legal_actions: list[int]
    """Legal moves of the agent, ascending; empty at the end."""
    game_phase: GamePhase = "playing"
    current_player_id: int = 0
    """Player whose turn it is; -4 at the end, as in OpenSpiel."""
    opponent_last_action: int | None = None
    """Latest move of another player in this episode; None if the rules may hide it."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Build an observation from all of its fields, in order, without validation.

        Validation would take longer than the game's own move.
        """
        observation = cls.__new__(cls)
        _set_attribute(observation, "__dict__", fields)
        _set_attribute(observation, "__pydantic_fields_set__", _ALL_FIELDS)
        _set_attribute(observation, "__pydantic_extra__", None)
        _set_attribute(observation, "__pydantic_private__", None)
        return observation

    def to_json(self) -> bytes:
        """Return the same JSON as `model_dump_json`, three times faster."""
        return orjson.dumps(self.__dict__)


_ALL_FIELDS = set(OpenSpielObservation.model_fields)


class OpenSpielState(State):
    """State of the episode, and the game."""

    game_name: str = UNNAMED_GAME
    agent_player: int = 0
    opponent_policy: str = "random"
    game_params: dict[str, Any] = Field(default_factory=dict)
    num_players: int = 1


@functools.lru_cache(maxsize=_MAX_CACHED_ACTIONS)
def _parse_cached_action(action_json: bytes) -> OpenSpielAction:
    return OpenSpielAction.__pydantic_validator__.validate_json(action_json)
