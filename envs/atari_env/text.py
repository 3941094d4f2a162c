"""Text view of Atari games. A message describes the situation, and the response names an action.

compact   user:      ball 9 coming up 2 below        distances in steps of 8 pixels
          assistant: LEFT

rules     system:    the goal, the actions and the format of responses
          user:      The ball is 72 pixels left of your paddle ...
          assistant: ... <answer>LEFT</answer>

The situation is read from the console's memory. Clients receive pictures, but policies do not.
"""

from __future__ import annotations

from typing import Literal

from ludus.env import Message
from ludus.env.text import extract_answer, find_named_action, quote_end
from ludus.proto.errors import ActionParseError

from .game_texts import make_game_text
from .models import AtariAction, AtariObservation

TextStyle = Literal["compact", "rules"]


class AtariRenderer:
    """Renderer for one game."""

    def __init__(self, game: str, style: TextStyle) -> None:
        self._game_text = make_game_text(game)
        self._style = style

    def render(self, observation: AtariObservation, *, first: bool) -> list[Message]:
        """Return messages that describe the situation, after the rules in the rules style."""
        if self._style == "compact":
            text = self._game_text.summarize(observation) if observation.legal_actions else "over"
            return [{"role": "user", "content": text}]
        message: Message = {"role": "user", "content": self._render_sentences(observation)}
        if not first:
            return [message]
        names = ", ".join(observation.action_names)
        format_rule = f"Actions: {names}. End with one in tags, for example <answer>FIRE</answer>."
        rules = f"{self._game_text.rules}\n\n{format_rule}"
        return [{"role": "system", "content": rules}, message]

    def parse(self, text: str, observation: AtariObservation) -> AtariAction:
        """Return the action that the text names.

        Raises:
            ActionParseError: The text names no action, or several.
        """
        names = observation.action_names
        response = extract_answer(text) if self._style == "rules" else text
        name = find_named_action(response, names) if observation.legal_actions else None
        if name is None:
            choices = ", ".join(names) if observation.legal_actions else "none: the game is over"
            raise ActionParseError(f"expected one action out of {choices}; got {quote_end(text)}")
        return AtariAction(action_id=names.index(name))

    def legal_answers(self, observation: AtariObservation) -> list[str]:
        """Return the names of the legal actions."""
        return [observation.action_names[action_id] for action_id in observation.legal_actions]

    def _render_sentences(self, observation: AtariObservation) -> str:
        score = f"Score: {observation.score:g}."
        if observation.lives:
            score += f" Lives: {observation.lives}."
        if not observation.legal_actions:
            return f"The game is over. {score}"
        return f"{self._game_text.describe(observation)} {score}"
