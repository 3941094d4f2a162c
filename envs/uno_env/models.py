"""What travels between an Uno server and its players."""

from __future__ import annotations

from pydantic import Field

from ludus.env import Action, Observation, State


class UnoAction(Action):
    """One move."""

    move: str
    """One of the observation's `legal_actions`: a card such as "red 5", a wild one with the colour
    that it calls, "wild blue" or "wild +4 blue", or "draw" or "pass"."""


class UnoObservation(Observation):
    """What one seat knows."""

    hand: list[str]
    """One's own cards, sorted."""
    top: str
    """The card that lies open."""
    colour: str
    """That has to be followed: the open card's, or the one that was called."""
    others: list[int]
    """How many cards the other players hold, in the order in which they sit after this seat."""
    legal_actions: list[str]
    """Moves by name; empty at the end."""
    has_drawn: bool = False
    """True where this turn's card was drawn: it may be played, and nothing else."""
    events: list[str] = Field(default_factory=list)
    """What was done since this seat's last move, which comes first; the player is player 0."""


class UnoState(State):
    """Where the episode stands; players do not see it."""

    num_players: int = 2
    opponent: str = "random"
    winner: int | None = None
    """The seat that has no card left; the player's own is 0."""
