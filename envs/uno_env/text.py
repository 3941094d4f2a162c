"""Text of Uno: the open card, the hand and the other players' moves. The response is a move.

compact   user:      top red 5 hand red 7, blue 5, wild others 4
          assistant: red 7
rules     system:    the rules and the format of responses
          user:      player 1 draws. Open card: red 5. ... Your legal moves: red 7 | ...
          assistant: ... <answer>red 7</answer>
"""

from __future__ import annotations

from typing import Literal

from ludus.env import Message
from ludus.env.text import extract_answer, find_named_action, quote_end
from ludus.proto.errors import ActionParseError

from .cards import WILDS
from .models import UnoAction, UnoObservation

TextStyle = Literal["compact", "rules"]

_RULES = (
    "You play Uno. Play a card that has the color, the number or the symbol of the open card, or"
    " play a wild card and call a color. If you cannot play, draw one card; then play that card,"
    " if you can, or pass. A skip makes the next player lose a turn. A reverse changes the"
    " direction of play. A +2 or wild +4 makes the next player draw that number of cards and lose"
    " a turn. You may play a wild +4 only if you have no card of the current color. The first"
    " player without cards wins. End with your move in tags, for example <answer>red 5</answer>,"
    " <answer>wild blue</answer> or <answer>draw</answer>."
)


class UnoRenderer:
    """Renderer for one seat."""

    def __init__(self, style: TextStyle) -> None:
        self._style = style

    def render(self, observation: UnoObservation, *, first: bool) -> list[Message]:
        """Return the situation. In the rules style, the rules come first."""
        if self._style == "compact":
            return [{"role": "user", "content": _render_compact(observation)}]
        message: Message = {"role": "user", "content": _render_sentences(observation)}
        return [{"role": "system", "content": _RULES}, message] if first else [message]

    def parse(self, text: str, observation: UnoObservation) -> UnoAction:
        """Return the legal move that the text names.

        Raises:
            ActionParseError: The text names no legal move, or several.
        """
        response = extract_answer(text) if self._style == "rules" else text
        move = find_named_action(response, observation.legal_actions)
        if move is None:
            legal_moves = ", ".join(observation.legal_actions) or "no move: the game is over"
            raise ActionParseError(f"expected one of {legal_moves}; got {quote_end(text)}")
        return UnoAction(move=move)

    def legal_answers(self, observation: UnoObservation) -> list[str]:
        """Return the legal moves."""
        return observation.legal_actions


def _format_open_card(observation: UnoObservation) -> str:
    called_color = f" {observation.colour}" if observation.top in WILDS else ""
    return f"{observation.top}{called_color}"


def _render_compact(observation: UnoObservation) -> str:
    counts = " ".join(map(str, observation.others))
    if not observation.legal_actions:
        return f"over others {counts}"
    drew_note = " drew" if observation.has_drawn else ""
    hand = ", ".join(observation.hand)
    return f"top {_format_open_card(observation)} hand {hand} others {counts}{drew_note}"


def _render_sentences(observation: UnoObservation) -> str:
    sentences = [f"{event}." for event in observation.events]
    if not observation.legal_actions:
        return " ".join([*sentences, "The game is over."])
    counts = ", ".join(map(str, observation.others))
    sentences += [
        f"Open card: {_format_open_card(observation)}.",
        f"Your hand: {', '.join(observation.hand)}.",
        f"Cards of the other players: {counts}.",
    ]
    return f"{' '.join(sentences)}\nYour legal moves: {' | '.join(observation.legal_actions)}"
