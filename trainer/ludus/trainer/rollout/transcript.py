"""Transcripts: readable records of a few episodes of each training step.

The choice of groups depends only on their index and the run's seed, so a run that is resumed or
repeated writes the same transcripts. The choice is random, because a choice of every n-th group
could miss environments that alternate regularly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from ludus.env import Message
from ludus.env.text.unicode import format_json
from ludus.proto.runs import Transcript, TranscriptMessage, TranscriptTurn
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.core.types import Rollout

MAX_TEXT_CHARACTERS = 20_000
MAX_TRANSCRIPT_CHARACTERS = 100_000


def count_transcripts(
    group_index: int, num_per_step: int, num_groups_per_step: int, run_seed: int
) -> int:
    """Return the number of transcripts of a group.

    Every block of `num_groups_per_step` consecutive groups has `num_per_step` transcripts in total.
    """
    num_each, num_extra = divmod(num_per_step, num_groups_per_step)
    block_index, index_in_block = divmod(group_index, num_groups_per_step)
    generator = make_random(run_seed, Stream.TRANSCRIPT, block_index)
    return num_each + (index_in_block in generator.sample(range(num_groups_per_step), num_extra))


def make_transcript(
    group_index: int,
    episode_index: int,
    rollout: Rollout,
    history: Iterable[TranscriptTurn],
    unanswered: Sequence[Message] = (),
) -> Transcript:
    """Return the transcript of a scored episode. Its step is 0 until a training step uses it.

    Args:
        unanswered: messages after the last completion.
    """
    turns: list[TranscriptTurn] = []
    num_characters_left = MAX_TRANSCRIPT_CHARACTERS
    for turn in history:
        num_characters_left -= len(turn.answer) + sum(len(message.text) for message in turn.shown)
        if turns and num_characters_left < 0:
            break
        turns.append(turn)
    return Transcript(
        step=0,
        environment=rollout.environment,
        group=group_index,
        episode=episode_index,
        seed=rollout.seed,
        policy_version=rollout.policy_version,
        status=rollout.status.value,
        reward=rollout.reward,
        episode_return=rollout.episode_return,
        success=rollout.success,
        terms={term.name: term.value for term in rollout.terms},
        failure=rollout.failure,
        turns=tuple(turns),
        num_turns_left_out=len(rollout.turns) - len(turns),
        unanswered=_cut_messages(unanswered),
    )


def make_transcript_turn(
    messages: Sequence[Message], text: str, action: Any, reward: float
) -> TranscriptTurn:
    """Return a turn of a transcript. Long texts and actions are cut.

    Args:
        messages: new messages before the completion.
        text: text of the completion.
    """
    return TranscriptTurn(
        shown=_cut_messages(messages),
        answer=cut_text(text, MAX_TEXT_CHARACTERS),
        action=_cut_action(action),
        reward=reward,
    )


def _cut_messages(messages: Sequence[Message]) -> tuple[TranscriptMessage, ...]:
    return tuple(
        TranscriptMessage(
            role=message["role"], text=cut_text(message["content"], MAX_TEXT_CHARACTERS)
        )
        for message in messages
    )


def _cut_action(action: Any) -> Any:
    """Return the action as JSON, or as cut text if it is too long."""
    json_action = to_jsonable_python(action, fallback=str, inf_nan_mode="strings")
    json_text = format_json(json_action)
    return (
        json_action
        if len(json_text) <= MAX_TEXT_CHARACTERS
        else cut_text(json_text, MAX_TEXT_CHARACTERS)
    )


def cut_text(text: str, max_characters: int) -> str:
    """Return the text; replace its end by a note if it is longer than `max_characters`."""
    num_cut = len(text) - max_characters
    return text if num_cut <= 0 else f"{text[:max_characters]}... ({num_cut} more characters)"
