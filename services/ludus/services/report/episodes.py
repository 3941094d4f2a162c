"""The report's section with transcripts of episodes."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.proto.runs import Transcript, TranscriptTurn
from ludus.services.report.markup import Markup, element
from ludus.services.transcripts import describe_consequence, describe_episode, describe_outcome

NUM_SHOWN = 3
"""Number of first episodes, and of last episodes, per environment."""


def select_transcripts(transcripts: Sequence[Transcript]) -> list[Transcript]:
    """Return the first and the last transcripts of an environment."""
    head = transcripts[:NUM_SHOWN]
    return [*head, *transcripts[max(len(head), len(transcripts) - NUM_SHOWN) :]]


def render_episodes(transcripts: Sequence[Transcript]) -> Markup:
    """Render episodes of one environment; only the first and the last are expanded."""
    sample = select_transcripts(transcripts)
    expanded = {0, len(sample) - 1}
    parts = [
        _episode(transcript, is_open=index in expanded) for index, transcript in enumerate(sample)
    ]
    return element("div", *parts, class_="episodes")


def _episode(transcript: Transcript, *, is_open: bool) -> Markup:
    omitted = None
    if transcript.num_turns_left_out:
        omitted = element("p", f"... and {transcript.num_turns_left_out} more turns")
    return element(
        "details",
        element(
            "summary",
            f"{describe_episode(transcript)} · ",
            element("em", describe_outcome(transcript)),
        ),
        *(part for turn in transcript.turns for part in _turn(turn)),
        omitted,
        _message("failure", transcript.failure, "failure") if transcript.failure else None,
        open="" if is_open else None,
    )


def _turn(turn: TranscriptTurn) -> list[Markup]:
    parts = [_message(message.role, message.text, "shown") for message in turn.shown]
    parts.append(_message("policy", turn.answer or "(empty)", "said"))
    consequence = describe_consequence(turn)
    if consequence:
        parts.append(element("p", consequence, class_="came"))
    return parts


def _message(role: str, content: str, class_: str) -> Markup:
    return element("div", element("span", role), element("pre", content), class_=f"words {class_}")
