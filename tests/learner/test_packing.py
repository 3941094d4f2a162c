"""Packing of sequences into prefix trees, in which each prefix is computed once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.trainer.core.types import Batch, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.micro_batches import (
    MicroBatch,
    MicroBatchConfig,
    make_micro_batches,
    pack_one_micro_batch,
    split_samples,
)
from ludus.trainer.learner.model import PolicyModel
from ludus.trainer.learner.packing import RowCosts, lay_out_sequences
from ludus.trainer.models.load import load_language_model
from tests.learner.tiny_policy import make_batch

LINEAR_COSTS = RowCosts(per_token=1.0, per_pair=0.0)
"""Row costs without attention, so that long rows cost no more than short rows."""
QUADRATIC_COSTS = RowCosts(per_token=100.0, per_pair=1.0)


def make_sample(token_ids: list[int], mask: list[bool], tag: float = 0.0) -> TrainingSample:
    """Return a sample whose first sampled token has the reward `tag`."""
    rewards = [tag * (index == mask.index(True)) for index in range(len(mask))]
    zeros = [0.0] * len(mask)
    return TrainingSample(token_ids, mask, zeros, zeros, rewards, terminated=True)


@st.composite
def draw_batches(draw: st.DrawFn) -> Batch:
    """Draw sequences of only three distinct tokens, so that many of them share prefixes."""
    sequences = draw(st.lists(st.lists(st.integers(3, 5), min_size=2, max_size=9), min_size=1))
    masks = [
        [False, True, *draw(st.lists(st.booleans(), min_size=len(s) - 2, max_size=len(s) - 2))]
        for s in sequences
    ]
    return collate(
        [
            make_sample(s, mask, tag=index + 1.0)
            for index, (s, mask) in enumerate(zip(sequences, masks, strict=True))
        ]
    )


def pack_batch(batch: Batch, costs: RowCosts | None, max_tokens: int) -> list[MicroBatch]:
    """Return the micro-batches of the whole batch on one rank, without trees if `costs` is None."""
    config = MicroBatchConfig(max_tokens, costs or LINEAR_COSTS, packs_trees=costs is not None)
    return make_micro_batches(batch, np.arange(batch.num_samples), config)


def compute_outputs(
    policy: PolicyModel, micro_batches: list[MicroBatch]
) -> dict[float, list[float]]:
    """Return the log-probs and entropies of each sample's tokens by the sample's reward."""
    outputs: dict[float, list[float]] = {}
    for micro_batch in micro_batches:
        output = policy(micro_batch.rows, temperature=0.7, entropy_mode="value")
        logprobs, entropies = (
            micro_batch.gather_samples(tensor) for tensor in (output.logprobs, output.entropies)
        )
        for row, mask in enumerate(micro_batch.mask):
            values = torch.cat([logprobs[row, mask], entropies[row, mask]]).tolist()
            outputs[micro_batch.rewards[row].sum().item()] = values
    return outputs


def list_prefixes(batch: Batch) -> set[tuple[int, ...]]:
    """Return all prefixes of all sequences."""
    return {
        tuple(sequence[: end + 1].tolist())
        for sequence in batch.sequences
        for end in range(len(sequence))
    }


@pytest.fixture(scope="module")
def policy(model_path: str) -> PolicyModel:
    """Return a tiny policy in evaluation mode."""
    return PolicyModel(load_language_model(model_path)).eval()


@pytest.mark.slow
@given(batch=draw_batches(), max_tokens=st.sampled_from([8, 20, 1000]))
@settings(max_examples=60, deadline=None)
def test_packed_sequences_have_the_same_outputs_as_single_sequences(
    policy: PolicyModel, batch: Batch, max_tokens: int
) -> None:
    with torch.no_grad():
        single_outputs = compute_outputs(policy, pack_batch(batch, None, max_tokens=1))
        for costs in (LINEAR_COSTS, QUADRATIC_COSTS):
            packed_outputs = compute_outputs(policy, pack_batch(batch, costs, max_tokens))
            assert packed_outputs.keys() == single_outputs.keys()
            for tag, values in packed_outputs.items():
                assert values == pytest.approx(single_outputs[tag], abs=2e-5)


@pytest.mark.slow
@given(batch=draw_batches())
def test_each_prefix_is_computed_once_without_attention_costs(batch: Batch) -> None:
    layout = lay_out_sequences(
        batch.sequences,
        np.arange(len(batch.sequences)),
        costs=LINEAR_COSTS,
        max_tokens=10_000,
        num_ranks=1,
    )
    assert len(layout.token_ids) == len(list_prefixes(batch))
    for leaf, sequence_id in enumerate(layout.sequence_ids):
        sequence = batch.sequences[sequence_id]
        nodes = layout.nodes[leaf, : len(sequence)]
        assert np.array_equal(layout.token_ids[nodes], sequence)
        assert np.array_equal(layout.depths[nodes], np.arange(len(sequence)))
        is_ancestor = (np.arange(len(layout.ends)) <= nodes[-1]) & (nodes[-1] < layout.ends)
        assert np.array_equal(np.flatnonzero(is_ancestor), nodes)


def test_rows_are_longer_if_attention_is_cheaper() -> None:
    batch = make_batch(num_samples=60, num_prefix_tokens=20)
    row_lengths = [
        max(
            micro_batch.rows.token_ids.shape[1]
            for micro_batch in pack_batch(batch, costs, max_tokens=4096)
        )
        for costs in (RowCosts(1.0, 1.0), RowCosts(100.0, 1.0), LINEAR_COSTS)
    ]
    assert row_lengths[0] < row_lengths[1] < row_lengths[2]


def test_packing_without_common_prefixes_costs_no_more_than_padding() -> None:
    batch = make_batch(num_samples=60)
    num_packed_tokens, num_padded_tokens = (
        sum(micro_batch.rows.num_tokens for micro_batch in pack_batch(batch, costs, max_tokens=256))
        for costs in (QUADRATIC_COSTS, None)
    )
    assert num_packed_tokens <= num_padded_tokens


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [8, 40, 10_000])
@pytest.mark.parametrize("packs_trees", [False, True])
def test_each_sample_is_on_one_rank_and_micro_batch_counts_are_equal(
    num_ranks: int, max_tokens: int, packs_trees: bool
) -> None:
    batch = make_batch(num_samples=25, num_prefix_tokens=5)
    for sample_indices in split_samples(batch, 2):
        configs = (
            MicroBatchConfig(max_tokens, QUADRATIC_COSTS, rank, num_ranks, packs_trees)
            for rank in range(num_ranks)
        )
        micro_batches = [make_micro_batches(batch, sample_indices, config) for config in configs]
        assert len({len(rank_batches) for rank_batches in micro_batches}) == 1
        rewards = [
            reward
            for rank_batches in micro_batches
            for micro_batch in rank_batches
            for reward in micro_batch.rewards.sum(1).tolist()
        ]
        expected_rewards = [batch.rewards[sample_index].sum() for sample_index in sample_indices]
        assert sorted(rewards) == pytest.approx(sorted(expected_rewards))


def test_ranks_share_work_that_would_fit_into_one_row() -> None:
    batch = make_batch(num_samples=48, num_prefix_tokens=4)
    sample_indices = np.arange(48)
    token_counts = [
        sum(
            micro_batch.rows.num_tokens
            for micro_batch in make_micro_batches(batch, sample_indices, config)
        )
        for config in (MicroBatchConfig(10_000, LINEAR_COSTS, rank, 2) for rank in range(2))
    ]
    assert max(token_counts) < 1.5 * min(token_counts)


@pytest.mark.parametrize(
    ("costs", "max_ratio"), [(RowCosts(1.0, 0.0), 1.01), (RowCosts(0.0, 1.0), 1.06)]
)
def test_ranks_get_rows_of_equal_total_cost(costs: RowCosts, max_ratio: float) -> None:
    lengths = [2, 4, 8, 16, 32, 64, 128, 256] + [100] * 20
    samples = [
        make_sample([index] * length, [False] + [True] * (length - 1), tag=1.0)
        for index, length in enumerate(lengths)
    ]
    batch = collate(samples)
    rank_costs = [
        sum(
            costs.compute_row(micro_batch.rows.token_ids.shape[1])
            for micro_batch in make_micro_batches(
                batch,
                np.arange(batch.num_samples),
                MicroBatchConfig(1, costs, rank, 4, packs_trees=False),
            )
        )
        for rank in range(4)
    ]
    assert max(rank_costs) <= max_ratio * sum(rank_costs) / 4


@pytest.mark.parametrize("costs", [None, QUADRATIC_COSTS])
def test_micro_batch_exceeds_max_tokens_only_for_a_single_sequence(
    costs: RowCosts | None,
) -> None:
    micro_batches = pack_batch(make_batch(num_samples=25), costs, max_tokens=40)
    assert len(micro_batches) > 3
    assert all(
        micro_batch.rows.num_tokens <= 40 or len(micro_batch.rows.token_ids) == 1
        for micro_batch in micro_batches
    )


def test_one_micro_batch_contains_all_samples_in_order() -> None:
    lengths = [90, 3, 40, 3, 12]
    samples = [
        make_sample([3 + index] * length, [False] + [True] * (length - 1))
        for index, length in enumerate(lengths)
    ]
    micro_batch = pack_one_micro_batch(samples)
    assert micro_batch.mask.sum(dim=1).tolist() == [length - 1 for length in lengths]
    tokens = micro_batch.gather_samples(micro_batch.rows.target_ids)
    assert tokens[:, 0].tolist() == [3, 4, 5, 6, 7]


def test_equal_tokens_with_different_masks_share_nodes() -> None:
    micro_batch = pack_one_micro_batch(
        [make_sample([3, 4, 5, 6], mask) for mask in ([False, True, True, False],) * 2]
    )
    batch = collate(
        [
            make_sample([3, 4, 5, 6], [False, True, True, False]),
            make_sample([3, 4, 5, 6], [False] * 3 + [True]),
        ]
    )
    [shared_micro_batch] = pack_batch(batch, LINEAR_COSTS, max_tokens=100)
    assert micro_batch.rows.num_tokens == shared_micro_batch.rows.num_tokens == 4
    assert shared_micro_batch.rows.target_ids.tolist() == [4, 5, 6]
    assert shared_micro_batch.mask.sum(1).tolist() == [2, 1]
