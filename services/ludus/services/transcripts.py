"""Descriptions of transcripts for the terminal and the report."""

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
    phrases = [
        transcript.status.replace("_", " "),
        f"return {_format_optional(transcript.episode_return)}",
    ]
    if transcript.terms and list(transcript.terms) != ["environment"]:
        terms = ", ".join(
            f"{name} {_format_optional(amount)}" for name, amount in transcript.terms.items()
        )
        phrases.append(f"reward {_format_optional(transcript.reward)} of {terms}")
    return " · ".join(phrases)


def describe_consequence(turn: TranscriptTurn) -> str:
    """Return one line with a turn's action and reward, or '' if it had neither."""
    action = turn.action
    if isinstance(action, dict) and list(action) == ["text"]:
        action = action["text"]
    phrases = [] if action is None else [f"action {json.dumps(action, ensure_ascii=False)}"]
    if turn.reward:
        phrases.append(f"reward {format_compact(turn.reward)}")
    return ", ".join(phrases)


def _format_optional(amount: float | None) -> str:
    return "none" if amount is None else format_compact(amount)
