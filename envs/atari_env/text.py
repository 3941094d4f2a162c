"""Atari games as text: what is where, read from the console's memory, answered with an action.

compact   user:      ball 9 coming up 2 below        distances in steps of 8 pixels
          assistant: LEFT

rules     system:    what the game is about, the actions, and how to answer
          user:      The ball is 72 pixels left of your paddle ...
          assistant: ... <answer>LEFT</answer>

Policies read text alone: pictures go over the wire, and no model here sees them.
"""

from __future__ import annotations

from typing import Literal

from ludus.env import Message
from ludus.env.text.answers import extract_answer, find_named_move, quoted
from ludus.proto.errors import ActionParseError

from .faces import face_of
from .models import AtariAction, AtariObservation

TextStyle = Literal["compact", "rules"]


class AtariRenderer:
    """Text for one game."""

    def __init__(self, game: str, style: TextStyle) -> None:
        self._face = face_of(game)
        self._style = style

    def render(self, observation: AtariObservation, *, first: bool) -> list[Message]:
        """The situation; in the style with rules, a system message before the first."""
        if self._style == "compact":
            brief = self._face.brief(observation) if observation.legal_actions else "over"
            return [{"role": "user", "content": brief}]
        shown: Message = {"role": "user", "content": self._prose(observation)}
        if not first:
            return [shown]
        names = ", ".join(observation.action_names)
        asks = f"Actions: {names}. End with one in tags, for example <answer>FIRE</answer>."
        return [{"role": "system", "content": f"{self._face.rules}\n\n{asks}"}, shown]

    def parse(self, text: str, observation: AtariObservation) -> AtariAction:
        """The action whose name the text holds, where it holds no other.

        Raises:
            ActionParseError: there is none.
        """
        names = observation.action_names
        said = extract_answer(text) if self._style == "rules" else text
        name = find_named_move(said, names) if observation.legal_actions else None
        if name is None:
            offered = ", ".join(names) if observation.legal_actions else "none: the game is over"
            raise ActionParseError(f"expected one action out of {offered}; got {quoted(text)}")
        return AtariAction(action_id=names.index(name))

    def legal_answers(self, observation: AtariObservation) -> list[str]:
        """The names of the legal actions."""
        return [observation.action_names[action_id] for action_id in observation.legal_actions]

    def _prose(self, observation: AtariObservation) -> str:
        standing = f"Score: {observation.score:g}."
        if observation.lives:
            standing += f" Lives: {observation.lives}."
        if not observation.legal_actions:
            return f"The game is over. {standing}"
        return f"{self._face.prose(observation)} {standing}"
