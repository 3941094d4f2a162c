"""Episodes as people read them: a few of each training step, word for word.

Which groups are written down follows from their index and the run's seed alone, so a run that is
resumed, or played again, writes down the same ones; and by chance, so that environments which
share the groups in some rhythm all have their turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from ludus.env import Message
from ludus.proto.runs import Transcript, TranscriptMessage, TranscriptTurn
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.core.types import Rollout
from ludus.trainer.rollout.conversation import Readable

MAX_TEXT_CHARACTERS = 20_000
MAX_TRANSCRIPT_CHARACTERS = 100_000


def num_transcripts(index: int, per_step: int, groups_per_step: int, run_seed: int) -> int:
    """How many episodes of group `index` are written down: `per_step` of each B groups in a row."""
    of_each, of_some = divmod(per_step, groups_per_step)
    block, place = divmod(index, groups_per_step)
    draw = make_random(run_seed, Stream.TRANSCRIPT, block)
    chosen = draw.sample(range(groups_per_step), of_some)
    return of_each + (place in chosen)


def make_transcript(
    group: int, episode: int, rollout: Rollout, record: Readable | None
) -> Transcript:
    """What was said in an episode that has its reward; no step has learned from it yet."""
    turns: list[TranscriptTurn] = []
    room = MAX_TRANSCRIPT_CHARACTERS
    for turn in _turns(record) if record else ():
        room -= len(turn.answer) + sum(len(said.text) for said in turn.shown)
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
        num_turns_left_out=record.num_turns - len(turns) if record else 0,
    )


def _turns(record: Readable) -> Iterator[TranscriptTurn]:
    for one in record.exchanges():
        yield TranscriptTurn(
            shown=_said(one.shown),
            answer=_cut(one.answer),
            action=_bounded(one.action),
            reward=one.reward,
        )


def _said(messages: Sequence[Message]) -> tuple[TranscriptMessage, ...]:
    return tuple(TranscriptMessage(role=one["role"], text=_cut(one["content"])) for one in messages)


def _bounded(action: Any) -> Any:
    """The action as JSON; what is too long of it as cut text."""
    plain = to_jsonable_python(action, fallback=str, inf_nan_mode="strings")
    text = json.dumps(plain)
    return plain if len(text) <= MAX_TEXT_CHARACTERS else _cut(text)


def _cut(text: str) -> str:
    rest = len(text) - MAX_TEXT_CHARACTERS
    return text if rest <= 0 else f"{text[:MAX_TEXT_CHARACTERS]}... ({rest} more characters)"
