"""Transcripts in words, as the terminal and the report show them."""

from __future__ import annotations

import json

from ludus.proto.runs import Transcript, TranscriptTurn
from ludus.services.numbers import compact


def heading(transcript: Transcript) -> str:
    """Which episode it is, in a line."""
    return (
        f"step {transcript.step} · {transcript.environment} · group {transcript.group}, "
        f"episode {transcript.episode} · seed {transcript.seed}"
    )


def outcome(transcript: Transcript) -> str:
    """How it ended and what it was worth, term by term where there is more to it, in a line."""
    parts = [transcript.status.replace("_", " "), f"return {_number(transcript.episode_return)}"]
    if transcript.terms and list(transcript.terms) != ["environment"]:
        terms = ", ".join(f"{name} {_number(value)}" for name, value in transcript.terms.items())
        parts.append(f"reward {_number(transcript.reward)} of {terms}")
    return " · ".join(parts)


def consequence(turn: TranscriptTurn) -> str:
    """What came of an answer, in a line; empty where nothing did."""
    action = turn.action
    if isinstance(action, dict) and list(action) == ["text"]:
        action = action["text"]
    parts = [] if action is None else [f"action {json.dumps(action, ensure_ascii=False)}"]
    if turn.reward:
        parts.append(f"reward {compact(turn.reward)}")
    return ", ".join(parts)


def _number(value: float | None) -> str:
    return "none" if value is None else compact(value)
