"""What all renderers share: the two styles of showing a game, and reading an answer.

compact   user:      hard 16 vs 10              the bare situation, for tiny models;
          assistant: HIT                        the answer and nothing else

rules     system:    the rules, and how to answer
          user:      Your hand: 10, 6 (hard 16). ...
          assistant: ... <answer>HIT</answer>   tagged, or the only move the text names

A renderer sees observations only, so it cannot tell more than the player may know.
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

TextStyle = Literal["compact", "rules"]

# Up to the last closing tag, whose opening one may stand in the prompt; and what never closes.
_THINKING = re.compile(r"\A.*</think>|<think>.*\Z", re.DOTALL | re.IGNORECASE)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MAX_QUOTED_CHARS = 200
_MAX_LISTED_ANSWERS = 20


class GameRenderer(ABC):
    """One game as text; a subclass names the moves and describes what the player sees."""

    words: tuple[str, ...] = ()
    """The answer for each action id, where a game has few and fixed ones."""
    rules: str
    """What a newcomer must know to play well."""
    needs_text: ClassVar[bool] = False
    """True where the observation must carry OpenSpiel's own strings."""

    def __init__(self, loaded: LoadedGame, player: int, style: TextStyle) -> None:
        self.loaded = loaded
        self.player = player
        self.style = style

    @abstractmethod
    def brief(self, observation: OpenSpielObservation) -> str:
        """The situation in as few characters as tell all of it."""

    @abstractmethod
    def prose(self, observation: OpenSpielObservation) -> str:
        """The situation as one would tell it to a person."""

    def answers(self, observation: OpenSpielObservation) -> Sequence[str]:
        """The answer for each legal action, in the order of `legal_actions`."""
        words = self.words
        return [words[action_id] for action_id in observation.legal_actions]

    def vocabulary(self, observation: OpenSpielObservation) -> Sequence[str]:
        """All words that name a move, legal now or not."""
        return self.words

    def render(self, observation: OpenSpielObservation, *, first: bool) -> list[Message]:
        """The messages that this observation adds; a system message only in the first."""
        if self.style == "compact":
            return [{"role": "user", "content": self.brief(observation)}]
        message: Message = {"role": "user", "content": self.prose(observation)}
        if not first:
            return [message]
        how_to_answer = "End with your move in tags, for example <answer>{}</answer>."
        example = self.answers(observation)[0] if observation.legal_actions else "..."
        system = f"{self.rules}\n\n{how_to_answer.format(example)}"
        return [{"role": "system", "content": system}, message]

    def legal_answers(self, observation: OpenSpielObservation) -> list[str]:
        """The legal actions as text that `parse` reads back."""
        return list(self.answers(observation))

    def parse(self, text: str, observation: OpenSpielObservation) -> OpenSpielAction:
        """The legal action that the text means.

        Raises:
            ActionParseError: the text names no legal action, or more than one.
        """
        answers = self.answers(observation)
        index = _index_of(self._answer_in(text, observation), answers)
        if index is None:
            listed = ", ".join(answers[:_MAX_LISTED_ANSWERS])
            if len(answers) > _MAX_LISTED_ANSWERS:
                listed += f", ... ({len(answers)} in all)"
            raise ActionParseError(
                f"expected one of {listed}, got {text[-_MAX_QUOTED_CHARS:]!r}; answer with "
                "exactly one of them"
            )
        return OpenSpielAction(action_id=observation.legal_actions[index])

    def _answer_in(self, text: str, observation: OpenSpielObservation) -> str:
        said = _THINKING.sub("", text)
        if self.style == "compact":
            return said
        tagged = _TAGGED.findall(said)
        if tagged:
            return tagged[-1]
        if _index_of(said, self.answers(observation)) is not None:
            return said
        named = _words_named(said, self.vocabulary(observation))
        return named.pop() if len(named) == 1 else said


def _index_of(answer: str, answers: Sequence[str]) -> int | None:
    """Where the answer is; upper and lower case count only where they tell two answers apart."""
    answer = " ".join(answer.split())
    if answer in answers:
        return answers.index(answer)
    folded = answer.casefold()
    matches = [index for index, known in enumerate(answers) if known.casefold() == folded]
    return matches[0] if len(matches) == 1 else None


def _words_named(text: str, vocabulary: Sequence[str]) -> set[str]:
    """The words of the vocabulary that the text contains as whole words."""
    longest_first = sorted(vocabulary, key=len, reverse=True)
    pattern = "|".join(re.escape(word) for word in longest_first if word)
    if not pattern:
        return set()
    found = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE)
    indices = (_index_of(word, vocabulary) for word in found)
    return {vocabulary[index] for index in indices if index is not None}
