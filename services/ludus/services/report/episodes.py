"""The section of the report that shows what the policy said."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.proto.runs import Transcript, TranscriptTurn
from ludus.services.report.markup import Markup, element
from ludus.services.transcripts import describe_consequence, describe_episode, describe_outcome

NUM_SHOWN = 3
"""Episodes of one environment, of the beginning and of the end each."""


def choice(transcripts: Sequence[Transcript]) -> list[Transcript]:
    """The first ones and the last ones of what was written down of an environment."""
    first = transcripts[:NUM_SHOWN]
    return [*first, *transcripts[max(len(first), len(transcripts) - NUM_SHOWN) :]]


def episodes(transcripts: Sequence[Transcript]) -> Markup:
    """Episodes of one environment, closed but for the first and the last."""
    shown = choice(transcripts)
    opened = {0, len(shown) - 1}
    parts = [_episode(one, is_open=n in opened) for n, one in enumerate(shown)]
    return element("div", *parts, class_="episodes")


def _episode(transcript: Transcript, *, is_open: bool) -> Markup:
    left_out = None
    if transcript.num_turns_left_out:
        left_out = element("p", f"... and {transcript.num_turns_left_out} turns more")
    return element(
        "details",
        element(
            "summary",
            f"{describe_episode(transcript)} · ",
            element("em", describe_outcome(transcript)),
        ),
        *(part for turn in transcript.turns for part in _turn(turn)),
        left_out,
        _words("failure", transcript.failure, "failure") if transcript.failure else None,
        open="" if is_open else None,
    )


def _turn(turn: TranscriptTurn) -> list[Markup]:
    parts = [_words(said.role, said.text, "shown") for said in turn.shown]
    parts.append(_words("policy", turn.answer or "(nothing)", "said"))
    came_of_it = describe_consequence(turn)
    if came_of_it:
        parts.append(element("p", came_of_it, class_="came"))
    return parts


def _words(who: str, words: str, class_: str) -> Markup:
    return element("div", element("span", who), element("pre", words), class_=f"words {class_}")
