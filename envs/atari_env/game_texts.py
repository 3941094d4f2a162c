"""Texts of single games: the rules, and the situation in a few words and in sentences.

For a game without a known memory layout, the situation is the score, the lives and the memory.
"""

from __future__ import annotations

from typing import Protocol

from .facts import (
    BREAKOUT_PADDLE_Y,
    PONG_PADDLE_X,
    Facts,
    compute_breakout_offset,
    compute_pong_offset,
)
from .models import AtariObservation

_STEP_PIXELS = 8
"""Number of pixels in one step, the unit of distance in short texts."""


class GameText(Protocol):
    """The text of one game."""

    rules: str

    def summarize(self, observation: AtariObservation) -> str:
        """Return the situation in a few words."""

    def describe(self, observation: AtariObservation) -> str:
        """Return the situation in sentences."""


class PongText:
    """Text of Pong: the ball relative to the player's paddle."""

    rules = (
        "You play Pong with the paddle on the right. RIGHT moves it up, LEFT moves it down. You"
        " lose a point when the ball passes your paddle, and win one when it passes your"
        " opponent's. The first player with 21 points wins."
    )

    def summarize(self, observation: AtariObservation) -> str:
        """Return for example "ball 9 coming up 2 below"."""
        facts = observation.facts
        if not facts["has_ball"]:
            return "no ball"
        distance = _count_steps(PONG_PADDLE_X - facts["ball_x"])
        motion = _choose(facts["ball_speed_x"], "going", "still", "coming")
        slope = _choose(facts["ball_speed_y"], "up", "level", "down")
        return (
            f"ball {distance} {motion} {slope} "
            f"{_describe_offset(compute_pong_offset(facts), 'above', 'below')}"
        )

    def describe(self, observation: AtariObservation) -> str:
        """Return the position of the ball and of the opponent, in pixels."""
        facts = observation.facts
        if not facts["has_ball"]:
            return "There is no ball in play."
        offset = compute_pong_offset(facts)
        motion = _choose(
            facts["ball_speed_x"], "moves away", "stays at this distance", "comes closer"
        )
        opponent_offset = facts["opponent_y"] - facts["paddle_y"]
        opponent_position = _choose(
            opponent_offset, "higher than", "from the height of", "lower than"
        )
        return (
            f"The ball is {PONG_PADDLE_X - facts['ball_x']} pixels left of your paddle and "
            f"{abs(offset)} pixels {_choose(offset, 'above', 'from', 'below')} its center. The"
            f" ball {motion} and moves {_describe_vertical_speed(facts)}. The opponent's paddle is"
            f" {abs(opponent_offset)} pixels {opponent_position} yours."
        )


class BreakoutText:
    """Text of Breakout: the ball relative to the paddle."""

    rules = (
        "You play Breakout. FIRE serves the ball; RIGHT and LEFT move the paddle at the bottom."
        " You score points for each brick that the ball hits, and lose a life when the ball passes"
        " the paddle."
    )

    def summarize(self, observation: AtariObservation) -> str:
        """Return for example "ball 9 falling left 2 right"."""
        facts = observation.facts
        if not facts["has_ball"]:
            return "no ball"
        height = _count_steps(BREAKOUT_PADDLE_Y - facts["ball_y"])
        motion = _choose(facts["ball_speed_y"], "rising", "still", "falling")
        slope = _choose(facts["ball_speed_x"], "left", "straight", "right")
        return (
            f"ball {height} {motion} {slope} "
            f"{_describe_offset(compute_breakout_offset(facts), 'left', 'right')}"
        )

    def describe(self, observation: AtariObservation) -> str:
        """Return the position of the ball, in pixels."""
        facts = observation.facts
        if not facts["has_ball"]:
            return "There is no ball in play. FIRE serves one."
        offset, speed = compute_breakout_offset(facts), facts["ball_speed_x"]
        return (
            f"The ball is {BREAKOUT_PADDLE_Y - facts['ball_y']} pixels above your paddle and "
            f"{abs(offset)} pixels {_choose(offset, 'left', 'away', 'right')} "
            f"{_choose(offset, 'of', 'from', 'of')} its center. The ball is moving {abs(speed)} "
            f"pixels {_choose(speed, 'left', 'sideways', 'right')} and "
            f"{_describe_vertical_speed(facts)}."
        )


class SpaceInvadersText:
    """Text of Space Invaders: the cannon relative to the fleet."""

    rules = (
        "You play Space Invaders. RIGHT and LEFT move your cannon, FIRE shoots upward, RIGHTFIRE"
        " and LEFTFIRE do both. You score points for each invader that you hit. Their bombs cost"
        " lives."
    )

    def summarize(self, observation: AtariObservation) -> str:
        """Return for example "cannon 2 right invaders 36 lives 3".

        The offset of the cannon is from the left edge of the fleet.
        """
        facts = observation.facts
        offset = _describe_offset(facts["cannon_x"] - facts["fleet_x"], "left", "right")
        return f"cannon {offset} invaders {facts['invaders']} lives {observation.lives}"

    def describe(self, observation: AtariObservation) -> str:
        """Return the positions of the cannon and of the fleet, in pixels."""
        facts = observation.facts
        return (
            f"Your cannon is at x = {facts['cannon_x']}. The left edge of the fleet is at x ="
            f" {facts['fleet_x']}. The fleet has {facts['invaders']} invaders."
        )


class MemoryText:
    """Text of any other game: the score, the lives and the memory."""

    def __init__(self, game: str) -> None:
        self.rules = (
            f"You play the Atari game {game.replace('_', ' ').title()}. Each message shows the 128"
            " bytes of the console's memory."
        )

    def summarize(self, observation: AtariObservation) -> str:
        """Return for example "score 10 lives 3" and the bytes."""
        return (
            f"score {observation.score:g} lives {observation.lives}\n{_format_memory(observation)}"
        )

    def describe(self, observation: AtariObservation) -> str:
        """Return the bytes."""
        return f"Memory: {_format_memory(observation)}."


_TEXT_TYPES: dict[str, type[GameText]] = {
    "pong": PongText,
    "breakout": BreakoutText,
    "space_invaders": SpaceInvadersText,
}


def has_own_text(game: str) -> bool:
    """Return True if the text of a game describes the situation in words."""
    return game in _TEXT_TYPES


def make_game_text(game: str) -> GameText:
    """Return the text of a game."""
    return _TEXT_TYPES[game]() if game in _TEXT_TYPES else MemoryText(game)


def _count_steps(pixels: int) -> int:
    return round(pixels / _STEP_PIXELS)


def _describe_offset(pixels: int, negative_phrase: str, positive_phrase: str) -> str:
    """Return for example "3 below", or "0 here" for less than half a step."""
    steps = _count_steps(pixels)
    return f"{abs(steps)} {_choose(steps, negative_phrase, 'here', positive_phrase)}"


def _choose(number: int, negative_phrase: str, zero_phrase: str, positive_phrase: str) -> str:
    return negative_phrase if number < 0 else positive_phrase if number > 0 else zero_phrase


def _describe_vertical_speed(facts: Facts) -> str:
    speed = facts["ball_speed_y"]
    return f"{abs(speed)} pixels {'down' if speed >= 0 else 'up'} per decision"


def _format_memory(observation: AtariObservation) -> str:
    memory = observation.memory or observation.screen
    return " ".join(map(str, memory if isinstance(memory, list) else ()))
