"""Transcripts as text for the terminal and the report."""

from __future__ import annotations

import json

from ludus.proto.runs import Transcript, TranscriptTurn
from ludus.services.numbers import format_compact


def describe_episode(transcript: Transcript) -> str:
    """Return one line that identifies the episode."""
    return (
        f"step {transcript.step} · {transcript.environment} · group {transcript.group}, "
        f"episode {transcript.episode} · seed {transcript.seed}"
    )


def describe_outcome(transcript: Transcript) -> str:
    """Return one line with the episode's status, return and reward terms."""
    parts = [
        transcript.status.replace("_", " "),
        f"return {_format_value(transcript.episode_return)}",
    ]
    if transcript.terms and list(transcript.terms) != ["environment"]:
        terms = ", ".join(
            f"{name} {_format_value(value)}" for name, value in transcript.terms.items()
        )
        parts.append(f"reward {_format_value(transcript.reward)} of {terms}")
    return " · ".join(parts)


def describe_consequence(turn: TranscriptTurn) -> str:
    """Return one line with a turn's action and reward; empty if it had neither."""
    action = turn.action
    if isinstance(action, dict) and list(action) == ["text"]:
        action = action["text"]
    parts = [] if action is None else [f"action {json.dumps(action, ensure_ascii=False)}"]
    if turn.reward:
        parts.append(f"reward {format_compact(turn.reward)}")
    return ", ".join(parts)


def _format_value(value: float | None) -> str:
    return "none" if value is None else format_compact(value)
