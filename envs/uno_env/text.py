"""Uno as text: the open card, one's own hand, and what the others did, answered with a move.

compact   user:      top red 5 hand red 7, blue 5, wild others 4
          assistant: red 7
rules     system:    the rules, and how to answer
          user:      player 1 draws. Open card: red 5. ... Your legal moves: red 7 | ...
          assistant: ... <answer>red 7</answer>
"""

from __future__ import annotations

from typing import Literal

from ludus.env import Message
from ludus.env.text.answers import extract_answer, find_named_move, quoted
from ludus.proto.errors import ActionParseError

from .cards import WILDS
from .models import UnoAction, UnoObservation

TextStyle = Literal["compact", "rules"]

_RULES = (
    "You play Uno. Play a card of the open card's colour, or with its number or sign, or a wild"
    " card and call a colour. Where none fits, draw one card; if it fits, play it or pass. skip"
    " passes over the next player, reverse turns the direction, +2 and wild +4 make the next player"
    " draw and lose the turn; wild +4 may be played only without a card of the colour. Who has no"
    " card left wins. End with your move in tags, for example <answer>red 5</answer>,"
    " <answer>wild blue</answer> or <answer>draw</answer>."
)


class UnoRenderer:
    """Text for one seat."""

    def __init__(self, style: TextStyle) -> None:
        self._style = style

    def render(self, observation: UnoObservation, *, first: bool) -> list[Message]:
        """The situation; in the style with rules, a system message before the first."""
        if self._style == "compact":
            return [{"role": "user", "content": _brief(observation)}]
        shown: Message = {"role": "user", "content": _prose(observation)}
        return [{"role": "system", "content": _RULES}, shown] if first else [shown]

    def parse(self, text: str, observation: UnoObservation) -> UnoAction:
        """The legal move that the text names.

        Raises:
            ActionParseError: it names none, or several.
        """
        said = extract_answer(text) if self._style == "rules" else text
        move = find_named_move(said, observation.legal_actions)
        if move is None:
            offered = ", ".join(observation.legal_actions) or "no move: the deal is over"
            raise ActionParseError(f"expected one of {offered}; got {quoted(text)}")
        return UnoAction(move=move)

    def legal_answers(self, observation: UnoObservation) -> list[str]:
        """The legal moves."""
        return observation.legal_actions


def _open(observation: UnoObservation) -> str:
    called = f" {observation.colour}" if observation.top in WILDS else ""
    return f"{observation.top}{called}"


def _brief(observation: UnoObservation) -> str:
    others = " ".join(map(str, observation.others))
    if not observation.legal_actions:
        return f"over others {others}"
    drew = " drew" if observation.has_drawn else ""
    return f"top {_open(observation)} hand {', '.join(observation.hand)} others {others}{drew}"


def _prose(observation: UnoObservation) -> str:
    said = [f"{event}." for event in observation.events]
    if not observation.legal_actions:
        return " ".join([*said, "The deal is over."])
    counts = ", ".join(map(str, observation.others))
    said += [
        f"Open card: {_open(observation)}.",
        f"Your hand: {', '.join(observation.hand)}.",
        f"The others hold {counts} cards.",
    ]
    return f"{' '.join(said)}\nYour legal moves: {' | '.join(observation.legal_actions)}"
