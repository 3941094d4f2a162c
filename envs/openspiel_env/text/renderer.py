"""The base class of renderers: three styles of prompts, and parsing of responses.

compact   user:      hard 16 vs 10              the situation, for tiny models
          assistant: HIT                        the move alone

rules     system:    the rules and the format of responses
          user:      Your hand: 10, 6 (hard 16). ...
          assistant: ... <answer>HIT</answer>   in tags, or the only move in the text

brief     system:    the rules
          user:      The dealer shows a ten. You have a hard sixteen.
          assistant: HIT                        as in the rules style; the prompt asks for no tags

A renderer sees only observations, so it cannot reveal hidden information.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from ludus.env import Message
from ludus.proto.errors import ActionParseError

from ..games import LoadedGame
from ..models import OpenSpielAction, OpenSpielObservation

TextStyle = Literal["compact", "rules", "brief"]

# Everything up to the last </think>, whose <think> may be in the prompt, and an unclosed <think>.
_THINKING_PATTERN = re.compile(r"\A.*</think>|<think>.*\Z", re.DOTALL | re.IGNORECASE)
_TAGGED_ANSWER_PATTERN = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MAX_QUOTED_CHARS = 200
_MAX_LISTED_ANSWERS = 20


class GameRenderer(ABC):
    """Renderer for one game. A subclass names the moves and describes the situation."""

    action_names: tuple[str, ...] = ()
    """Name of each action id, for games with a small, fixed set of actions."""
    rules: str
    """Rules of the game, for a new player."""
    needs_text: ClassVar[bool] = False
    """True if the renderer needs OpenSpiel's strings in the observation."""

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        self.loaded_game = loaded_game
        self.player = player
        self.style = style

    @abstractmethod
    def summarize(self, observation: OpenSpielObservation) -> str:
        """Return the complete situation in as few characters as possible."""

    @abstractmethod
    def describe(self, observation: OpenSpielObservation) -> str:
        """Return the situation in sentences."""

    def describe_briefly(self, observation: OpenSpielObservation, *, first: bool) -> str:
        """Return what matters of the situation; after the first call, only what can change."""
        return self.describe(observation)

    def list_legal_names(self, observation: OpenSpielObservation) -> Sequence[str]:
        """Return the name of each legal action, in the order of `legal_actions`."""
        action_names = self.action_names
        return [action_names[action_id] for action_id in observation.legal_actions]

    def list_move_names(self, observation: OpenSpielObservation) -> Sequence[str]:
        """Return the names of all moves, including illegal ones."""
        return self.action_names

    def render(self, observation: OpenSpielObservation, *, first: bool) -> list[Message]:
        """Return the new messages. The first call adds the rules, but not in the compact style."""
        if self.style == "compact":
            return [{"role": "user", "content": self.summarize(observation)}]
        if self.style == "brief":
            situation = self.describe_briefly(observation, first=first)
        else:
            situation = self.describe(observation)
        message: Message = {"role": "user", "content": situation}
        if not first:
            return [message]
        system_prompt = f"{self.rules}\n\n{self._explain_format(observation)}"
        return [{"role": "system", "content": system_prompt}, message]

    def _explain_format(self, observation: OpenSpielObservation) -> str:
        names = self.list_legal_names(observation)
        example = names[0] if names else "..."
        if self.style == "brief":
            # A single example raises the probability of its move, so two moves are both named.
            moves = " or ".join(names) if len(names) == 2 else f"for example {example}"
            return f"Answer with your move alone, {moves}."
        return f"End with your move in tags, for example <answer>{example}</answer>."

    def legal_answers(self, observation: OpenSpielObservation) -> list[str]:
        """Return the legal actions as text that `parse` accepts."""
        return list(self.list_legal_names(observation))

    def parse(self, text: str, observation: OpenSpielObservation) -> OpenSpielAction:
        """Return the legal action that the text names.

        Raises:
            ActionParseError: The text names no legal action, or several.
        """
        answers = self.list_legal_names(observation)
        index = _find_name(self._extract_answer(text, observation), answers)
        if index is None:
            choices = ", ".join(answers[:_MAX_LISTED_ANSWERS])
            if len(answers) > _MAX_LISTED_ANSWERS:
                choices += f", ... ({len(answers)} in total)"
            raise ActionParseError(
                f"expected one of {choices}, got {text[-_MAX_QUOTED_CHARS:]!r}; answer with "
                "exactly one of them"
            )
        return OpenSpielAction(action_id=observation.legal_actions[index])

    def _extract_answer(self, text: str, observation: OpenSpielObservation) -> str:
        response = _THINKING_PATTERN.sub("", text)
        if self.style == "compact":
            return response
        tagged_answers = _TAGGED_ANSWER_PATTERN.findall(response)
        if tagged_answers:
            return tagged_answers[-1]
        if _find_name(response, self.list_legal_names(observation)) is not None:
            return response
        names = _find_vocabulary_words(response, self.list_move_names(observation))
        return names.pop() if len(names) == 1 else response


def _find_name(text: str, names: Sequence[str]) -> int | None:
    """Return the index of the only name that equals the text; exact case wins over any case."""
    name = " ".join(text.split())
    if name in names:
        return names.index(name)
    folded_name = name.casefold()
    matches = [index for index, choice in enumerate(names) if choice.casefold() == folded_name]
    return matches[0] if len(matches) == 1 else None


def _find_vocabulary_words(text: str, vocabulary: Sequence[str]) -> set[str]:
    """Return the words of the vocabulary that the text contains as whole words."""
    sorted_words = sorted(vocabulary, key=len, reverse=True)
    pattern = "|".join(re.escape(word) for word in sorted_words if word)
    if not pattern:
        return set()
    matches = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE)
    indices = (_find_name(match, vocabulary) for match in matches)
    return {vocabulary[index] for index in indices if index is not None}
