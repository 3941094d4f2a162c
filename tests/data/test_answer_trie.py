"""The tokens of legal answers, and their way through rollouts, batches and checkpoints."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from ludus.proto.config import GrpoConfig
from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.core.ragged import RaggedArray
from ludus.trainer.core.types import (
    RolloutGroup,
    SampledCompletion,
    TrainingSample,
    Turn,
    join_turns,
)
from ludus.trainer.data.batch import collate, make_batch
from ludus.trainer.run.checkpoint import RunState
from tests.data.rollouts import make_rollout

END = 1
TRIE = AnswerTrie([(5, END), (5, 6, END), (7, 8, END), (5, 6, END)])


def make_turn(*token_ids: int, is_restricted: bool = True) -> Turn:
    """Return a turn with a prompt of two tokens and these sampled tokens."""
    allowed_ids = TRIE.list_allowed_ids(token_ids) if is_restricted else None
    logprobs = [-0.5] * len(token_ids)
    return Turn([3, 4], SampledCompletion(list(token_ids), logprobs, 0, True, allowed_ids))


def make_restricted_group() -> RolloutGroup:
    """Return a group of two episodes of two restricted turns."""
    turns = [[make_turn(5, 6, END), make_turn(7, 8, END)], [make_turn(5, END), make_turn(5, END)]]
    rollouts = [
        replace(make_rollout(float(index)), sequences=(join_turns(episode_turns),))
        for index, episode_turns in enumerate(turns)
    ]
    return RolloutGroup(0, "coins", tuple(rollouts))


def make_sample(allowed_ids: RaggedArray | None, reward: float = 0.0) -> TrainingSample:
    zeros = [0.0] * 3
    return TrainingSample(
        [3, 5, END], [False, True, True], zeros, zeros, [0, 0, reward], True, False, allowed_ids
    )


def list_rows(array: RaggedArray | None) -> list[list[int]]:
    assert array is not None
    return [row.tolist() for row in array]


def test_only_continuations_of_legal_answers_are_allowed() -> None:
    assert list_rows(TRIE.list_allowed_ids([5, 6, END])) == [[5, 7], [END, 6], [END]]
    assert list_rows(TRIE.list_allowed_ids([7])) == [[5, 7]]
    assert TRIE.find_allowed_ids([5, END]) is None
    for token_ids, position in (([5, 8], 1), ([9], 0), ([5, END, 5], 2)):
        with pytest.raises(ValueError, match=f"token {token_ids[-1]} at position {position}"):
            TRIE.list_allowed_ids(token_ids)


def test_allowed_tokens_travel_from_turns_to_the_batch() -> None:
    batch = make_batch([make_restricted_group()], GrpoConfig())
    expected = [[5, 7], [END, 6], [END], [5, 7], [8], [END], *[[5, 7], [END, 6]] * 2]
    assert list_rows(batch.allowed_ids) == expected
    assert batch.allowed_ids is not None
    assert len(batch.allowed_ids) == batch.num_sampled_tokens.sum()


def test_allowed_tokens_survive_transfer_and_checkpoints_unchanged() -> None:
    group = make_restricted_group()
    state = RunState(step=1, buffered_groups=[group, RolloutGroup(1, "coins", (make_rollout(1),))])
    for restored_groups in (
        pickle.loads(pickle.dumps(state.buffered_groups)),
        RunState.model_validate_json(state.model_dump_json(by_alias=True)).buffered_groups,
    ):
        assert restored_groups == state.buffered_groups
        restored_sequence = restored_groups[0].rollouts[0].sequences[0]
        assert restored_sequence.allowed_ids.values.dtype == np.int32
        assert restored_sequence != replace(restored_sequence, allowed_ids=None)
        assert restored_groups[1].rollouts[0].sequences[0].allowed_ids is None


def test_equal_tokens_share_a_sequence_only_if_they_were_restricted_equally() -> None:
    wide, narrow = (
        AnswerTrie(answers).list_allowed_ids([5, END])
        for answers in ([(5, END), (7, END)], [(5, END)])
    )
    batch = collate([make_sample(allowed_ids) for allowed_ids in (wide, narrow, wide)])
    assert batch.sequence_of_sample.tolist() == [0, 1, 0]
    assert list_rows(batch.allowed_ids) == [[5, 7], [END], [5], [END]]


def test_restricted_and_unrestricted_sequences_cannot_share_a_batch() -> None:
    samples = [make_sample(TRIE.list_allowed_ids([5, END])), make_sample(None)]
    with pytest.raises(ValueError, match="1 of 2 token sequences are restricted"):
        collate(samples)
    assert collate([make_sample(None)]).allowed_ids is None
