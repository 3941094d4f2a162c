"""What travels between an OpenSpiel server and its players; the fields are OpenEnv's."""

from __future__ import annotations

import functools
from typing import Any, Literal, Self

import orjson
from pydantic import Field

from ludus.env import Action, Observation, State

UNNAMED_GAME = "catch"
"""OpenEnv's clients send this game name when their user named none, whatever is played."""

GamePhase = Literal["initial", "playing", "terminal"]

_MAX_KEPT_BYTES = 64
_MAX_KEPT_ACTIONS = 4096

_set = object.__setattr__


class OpenSpielAction(Action):
    """One move of the agent."""

    action_id: int
    """One of the observation's `legal_actions`."""
    game_name: str = UNNAMED_GAME
    """The game this move is meant for; the default stands for the one that is played."""
    game_params: dict[str, Any] = Field(default_factory=dict)
    """The parameters this move is meant for; the default stands for those in force."""

    @classmethod
    def from_json(cls, action_json: bytes) -> OpenSpielAction:
        """The move; a game has few, and the environment changes none, so they are kept."""
        if cls is OpenSpielAction and len(action_json) <= _MAX_KEPT_BYTES:
            return _kept_action(action_json)
        return super().from_json(action_json)


class OpenSpielObservation(Observation):
    """What the agent's seat may know of the game."""

    info_state: list[float]
    """OpenSpiel's information-state tensor, else its observation tensor, flat; empty where
    the game has neither."""
    legal_actions: list[int]
    """The agent's legal moves, ascending; empty at the end."""
    game_phase: GamePhase = "playing"
    current_player_id: int = 0
    """Whose turn it is; -4 at the end, as in OpenSpiel."""
    opponent_last_action: int | None = None
    """The latest move of another player in this episode; None where the rules may hide it."""

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """The observation of all fields, in their order, which are right by construction.

        Validating each observation would take longer than the game's own move.
        """
        observation = cls.__new__(cls)
        _set(observation, "__dict__", fields)
        _set(observation, "__pydantic_fields_set__", _ALL_FIELDS)
        _set(observation, "__pydantic_extra__", None)
        _set(observation, "__pydantic_private__", None)
        return observation

    def to_json(self) -> bytes:
        """What `model_dump_json` gives, in a third of its time: the fields are JSON's own types."""
        return orjson.dumps(self.__dict__)


_ALL_FIELDS = set(OpenSpielObservation.model_fields)


class OpenSpielState(State):
    """Where an episode stands and what is played."""

    game_name: str = UNNAMED_GAME
    agent_player: int = 0
    opponent_policy: str = "random"
    game_params: dict[str, Any] = Field(default_factory=dict)
    num_players: int = 1


@functools.lru_cache(maxsize=_MAX_KEPT_ACTIONS)
def _kept_action(action_json: bytes) -> OpenSpielAction:
    return OpenSpielAction.__pydantic_validator__.validate_json(action_json)
