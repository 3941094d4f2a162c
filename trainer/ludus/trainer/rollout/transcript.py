"""Transcripts: readable records of a few episodes of each training step.

The choice of groups depends only on their index and the run's seed, so a run that is resumed or
repeated writes the same transcripts. It is random, so that environments that alternate in a fixed
rhythm are all represented.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from ludus.env import Message
from ludus.proto.runs import Transcript, TranscriptMessage, TranscriptTurn
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.core.types import Rollout

MAX_TEXT_CHARACTERS = 20_000
MAX_TRANSCRIPT_CHARACTERS = 100_000


def num_transcripts(index: int, per_step: int, groups_per_step: int, run_seed: int) -> int:
    """Return the number of transcripts of group `index`.

    Every block of `groups_per_step` consecutive groups has `per_step` transcripts in total.
    """
    num_each, num_extra = divmod(per_step, groups_per_step)
    block, group = divmod(index, groups_per_step)
    draw = make_random(run_seed, Stream.TRANSCRIPT, block)
    return num_each + (group in draw.sample(range(groups_per_step), num_extra))


def make_transcript(
    group: int, episode: int, rollout: Rollout, history: Iterable[TranscriptTurn]
) -> Transcript:
    """Return the transcript of a scored episode; its step is 0 until a step trains on it."""
    turns: list[TranscriptTurn] = []
    room = MAX_TRANSCRIPT_CHARACTERS
    for turn in history:
        room -= len(turn.answer) + sum(len(message.text) for message in turn.shown)
        if turns and room < 0:
            break
        turns.append(turn)
    return Transcript(
        step=0,
        environment=rollout.environment,
        group=group,
        episode=episode,
        seed=rollout.seed,
        policy_version=rollout.policy_version,
        status=rollout.status.value,
        reward=rollout.reward,
        episode_return=rollout.episode_return,
        terms={term.name: term.value for term in rollout.terms},
        failure=rollout.failure,
        turns=tuple(turns),
        num_turns_left_out=len(rollout.turns) - len(turns),
    )


def make_transcript_turn(
    messages: Sequence[Message], text: str, action: Any, reward: float
) -> TranscriptTurn:
    """Return a turn with cut texts: new messages, text of the completion, and its effect."""
    return TranscriptTurn(
        shown=tuple(
            TranscriptMessage(role=message["role"], text=_cut(message["content"]))
            for message in messages
        ),
        answer=_cut(text),
        action=_cut_action(action),
        reward=reward,
    )


def _cut_action(action: Any) -> Any:
    """Return the action as JSON, or as cut text if it is too long."""
    plain_action = to_jsonable_python(action, fallback=str, inf_nan_mode="strings")
    text = json.dumps(plain_action)
    return plain_action if len(text) <= MAX_TEXT_CHARACTERS else _cut(text)


def _cut(text: str) -> str:
    num_cut = len(text) - MAX_TEXT_CHARACTERS
    return text if num_cut <= 0 else f"{text[:MAX_TEXT_CHARACTERS]}... ({num_cut} more characters)"
