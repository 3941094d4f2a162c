"""Messages between a uno_env server and its players."""

from __future__ import annotations

from pydantic import Field

from ludus.env import Action, Observation, State


class UnoAction(Action):
    """One move."""

    move: str
    """An element of the observation's `legal_actions`: a card such as "red 5", a wild card with the
    color it calls ("wild blue", "wild +4 blue"), "draw" or "pass"."""


class UnoObservation(Observation):
    """The game as one seat sees it."""

    hand: list[str]
    """The player's cards, sorted."""
    top: str
    """The open card."""
    colour: str
    """The color to follow: that of the open card, or the called color."""
    others: list[int]
    """Number of cards of each other player, in seat order after this seat."""
    legal_actions: list[str]
    """Legal moves by name; empty at the end."""
    has_drawn: bool = False
    """True if the player drew a card in this turn. It may play that card and no other."""
    events: list[str] = Field(default_factory=list)
    """Moves since the last observation, the player's own move first. The player is player 0."""


class UnoState(State):
    """State of the episode, hidden from players."""

    num_players: int = 2
    opponent: str = "random"
    winner: int | None = None
    """Seat without cards. The player has seat 0."""
