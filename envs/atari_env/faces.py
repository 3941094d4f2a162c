"""How each game is told: its rules, and its situation in few words and in sentences.

Of a game whose memory nobody has read, that is the score, the lives and the 128 bytes.
"""

from __future__ import annotations

from typing import Protocol

from .facts import (
    BREAKOUT_PADDLE_Y,
    PONG_PADDLE_X,
    Facts,
    breakout_aside,
    pong_aside,
)
from .models import AtariObservation

_STEP_PIXELS = 8
"""Distances in few words count such steps."""


class Face(Protocol):
    """One game as text."""

    rules: str

    def brief(self, observation: AtariObservation) -> str:
        """The situation in few words."""

    def prose(self, observation: AtariObservation) -> str:
        """The situation as one would tell it to a person."""


class PongFace:
    """Where the ball is, seen from one's own paddle."""

    rules = (
        "You play Pong with the paddle on the right. RIGHT moves it up, LEFT moves it down. Who"
        " lets the ball pass loses a point; 21 points win."
    )

    def brief(self, observation: AtariObservation) -> str:
        """For example "ball 9 coming up 2 below"."""
        facts = observation.facts
        if not facts["has_ball"]:
            return "no ball"
        away = _steps(PONG_PADDLE_X - facts["ball_x"])
        motion = _word(facts["ball_speed_x"], "going", "still", "coming")
        slope = _word(facts["ball_speed_y"], "up", "level", "down")
        return f"ball {away} {motion} {slope} {_sided(pong_aside(facts), 'above', 'below')}"

    def prose(self, observation: AtariObservation) -> str:
        """Ball and opponent, in pixels."""
        facts = observation.facts
        if not facts["has_ball"]:
            return "There is no ball in play."
        aside, opponent = pong_aside(facts), facts["opponent_y"] - facts["paddle_y"]
        motion = _word(facts["ball_speed_x"], "moves away", "stands", "comes nearer")
        return (
            f"The ball is {PONG_PADDLE_X - facts['ball_x']} pixels left of your paddle and "
            f"{abs(aside)} {_word(aside, 'above', 'from', 'below')} its middle; it {motion}, "
            f"{_vertically(facts)}. The opponent's paddle is {abs(opponent)} pixels "
            f"{_word(opponent, 'above', 'from', 'below')} the height of yours."
        )


class BreakoutFace:
    """Where the ball is, seen from the paddle."""

    rules = (
        "You play Breakout. FIRE serves the ball; RIGHT and LEFT move the paddle below. Bricks"
        " that the ball hits are points, and a ball that passes the paddle costs a life."
    )

    def brief(self, observation: AtariObservation) -> str:
        """For example "ball 9 falling left 2 right"."""
        facts = observation.facts
        if not facts["has_ball"]:
            return "no ball"
        height = _steps(BREAKOUT_PADDLE_Y - facts["ball_y"])
        motion = _word(facts["ball_speed_y"], "rising", "still", "falling")
        slope = _word(facts["ball_speed_x"], "left", "straight", "right")
        return f"ball {height} {motion} {slope} {_sided(breakout_aside(facts), 'left', 'right')}"

    def prose(self, observation: AtariObservation) -> str:
        """The ball, in pixels."""
        facts = observation.facts
        if not facts["has_ball"]:
            return "There is no ball in play: FIRE serves one."
        aside, speed = breakout_aside(facts), facts["ball_speed_x"]
        return (
            f"The ball is {BREAKOUT_PADDLE_Y - facts['ball_y']} pixels above your paddle and "
            f"{abs(aside)} {_word(aside, 'left', 'aside', 'right')} of its middle; it moves "
            f"{abs(speed)} {_word(speed, 'left', 'aside', 'right')} and {_vertically(facts)}."
        )


class InvadersFace:
    """Where the cannon is, seen from the fleet."""

    rules = (
        "You play Space Invaders. RIGHT and LEFT move your cannon, FIRE shoots upwards, RIGHTFIRE"
        " and LEFTFIRE do both. Invaders that are hit are points; their bombs cost lives."
    )

    def brief(self, observation: AtariObservation) -> str:
        """For example "cannon 2 right invaders 36 lives 3"; from the left edge of the fleet."""
        facts = observation.facts
        aside = _sided(facts["cannon_x"] - facts["fleet_x"], "left", "right")
        return f"cannon {aside} invaders {facts['invaders']} lives {observation.lives}"

    def prose(self, observation: AtariObservation) -> str:
        """Cannon and fleet, in pixels."""
        facts = observation.facts
        return (
            f"Your cannon is at x {facts['cannon_x']}, the left edge of the fleet at x "
            f"{facts['fleet_x']}; {facts['invaders']} invaders are left."
        )


class UnknownFace:
    """Score, lives and memory."""

    def __init__(self, game: str) -> None:
        self.rules = (
            f"You play the Atari game {game.replace('_', ' ').title()}. Each message shows the 128"
            " bytes of the console's memory."
        )

    def brief(self, observation: AtariObservation) -> str:
        """For example "score 10 lives 3" and the bytes."""
        return f"score {observation.score:g} lives {observation.lives}\n{_memory(observation)}"

    def prose(self, observation: AtariObservation) -> str:
        """The bytes; what else there is to say is said of every game."""
        return f"Memory: {_memory(observation)}."


def face_of(game: str) -> Face:
    """How the game is told."""
    known: dict[str, type[Face]] = {
        "pong": PongFace,
        "breakout": BreakoutFace,
        "space_invaders": InvadersFace,
    }
    return known[game]() if game in known else UnknownFace(game)


def _steps(pixels: int) -> int:
    return round(pixels / _STEP_PIXELS)


def _sided(pixels: int, negative: str, positive: str) -> str:
    """For example "3 below"; "0 here" where it is within half a step."""
    steps = _steps(pixels)
    return f"{abs(steps)} {_word(steps, negative, 'here', positive)}"


def _word(number: int, negative: str, zero: str, positive: str) -> str:
    return negative if number < 0 else positive if number > 0 else zero


def _vertically(facts: Facts) -> str:
    speed = facts["ball_speed_y"]
    return f"{abs(speed)} pixels {'down' if speed >= 0 else 'up'} a decision"


def _memory(observation: AtariObservation) -> str:
    seen = observation.memory or observation.screen
    return " ".join(map(str, seen if isinstance(seen, list) else ()))
