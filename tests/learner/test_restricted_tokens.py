"""Training on completions that were restricted to legal answers."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from ludus.proto.config import AlgorithmConfig, GrpoConfig, LoraConfig, PpoConfig
from ludus.trainer.core.ragged import RaggedArray
from ludus.trainer.core.types import Coefficients, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.micro_batches import (
    MicroBatchConfig,
    make_micro_batches,
    pack_one_micro_batch,
)
from ludus.trainer.learner.model import PolicyModel
from ludus.trainer.learner.packing import RowCosts
from ludus.trainer.models.load import load_language_model
from tests.learner.tiny_policy import make_learner, make_samples

pytestmark = pytest.mark.slow

COEFFICIENTS = Coefficients(learning_rate=1e-2, entropy=0.01, kl=0.1)
TEMPERATURE = 0.7
COSTS = RowCosts(per_token=1.0, per_pair=0.0)
GRPO = GrpoConfig(kl_coef=0.1, geometric_mask=None)


def restrict(sample: TrainingSample, seed: int, *, forces: bool = False) -> TrainingSample:
    """Return a sample whose sampled tokens were chosen from at most five allowed tokens."""
    generator = random.Random(seed)
    rows = []
    for token_id in np.asarray(sample.token_ids)[np.asarray(sample.loss_mask)].tolist():
        num_others = 0 if forces else generator.randrange(5)
        rows.append(sorted({token_id, *generator.sample(range(3, 250), num_others)}))
    return replace(sample, allowed_ids=RaggedArray.from_rows(rows, np.int32))


def make_restricted_samples(*, forces: bool = False) -> list[TrainingSample]:
    """Return samples of which some have the same tokens and different allowed tokens."""
    samples = make_samples(18, num_prefix_tokens=8)
    return [restrict(sample, seed, forces=forces) for seed, sample in enumerate(samples)]


@torch.no_grad()
def compute_reference(policy: PolicyModel, sample: TrainingSample) -> tuple[list[float], ...]:
    """Return log-probs and entropies of a sample's tokens, in float64 from one forward pass."""
    logits = policy.language_model(torch.tensor([list(sample.token_ids)])).logits[0].double()
    logprobs, entropies = [], []
    positions = np.flatnonzero(sample.loss_mask).tolist()
    assert sample.allowed_ids is not None
    for position, allowed_ids in zip(positions, sample.allowed_ids, strict=True):
        weights = (logits[position - 1, allowed_ids.tolist()] / TEMPERATURE).exp()
        probabilities = dict(zip(allowed_ids.tolist(), (weights / weights.sum()), strict=True))
        logprobs.append(probabilities[sample.token_ids[position]].log().item())
        entropies.append(-sum(float(p * p.log()) for p in probabilities.values()))
    return logprobs, entropies


@pytest.fixture(scope="module")
def policy(model_path: str) -> PolicyModel:
    return PolicyModel(load_language_model(model_path)).eval()


@pytest.mark.parametrize("mode", ["value", "gradient"])
def test_log_probs_are_those_of_the_restricted_distribution(policy: PolicyModel, mode: str) -> None:
    for sample in make_restricted_samples()[:6]:
        micro_batch = pack_one_micro_batch([sample])
        output = policy(micro_batch.rows, TEMPERATURE, mode)
        logprobs, entropies = compute_reference(policy, sample)
        assert output.logprobs.tolist() == pytest.approx(logprobs, abs=1e-6)
        assert output.entropies.tolist() == pytest.approx(entropies, abs=1e-6)


def test_packed_prefixes_keep_the_allowed_tokens_of_each_sample(policy: PolicyModel) -> None:
    samples = make_restricted_samples()
    batch = collate(samples)
    sample_ids = np.arange(batch.num_samples)
    num_shared = 0
    for packs_trees in (False, True):
        config = MicroBatchConfig(128, COSTS, packs_trees=packs_trees)
        for micro_batch in make_micro_batches(batch, sample_ids, config):
            with torch.no_grad():
                output = policy(micro_batch.rows, TEMPERATURE, "value")
            logprobs = micro_batch.gather_samples(output.logprobs)
            for row, sample_id in enumerate(micro_batch.sample_ids.tolist()):
                packed_logprobs = logprobs[row, micro_batch.mask[row]].tolist()
                expected, _ = compute_reference(policy, samples[sample_id])
                assert packed_logprobs == pytest.approx(expected, abs=2e-5)
                num_shared += micro_batch.rows.ends is not None
    assert num_shared > 6


@pytest.mark.parametrize("algorithm", [GRPO, PpoConfig(geometric_mask=None)], ids=["grpo", "ppo"])
def test_forced_tokens_have_log_prob_zero_and_no_gradient(
    model_path: str, algorithm: AlgorithmConfig
) -> None:
    learner = make_learner(model_path, algorithm)
    samples = [
        replace(sample, rollout_logprobs=[0.0] * len(sample.token_ids))
        for sample in make_restricted_samples(forces=True)
    ]
    config = MicroBatchConfig(4096, COSTS, packs_trees=False)
    [micro_batch] = make_micro_batches(collate(samples), np.arange(len(samples)), config)
    with torch.no_grad():
        assert set(learner.model(micro_batch.rows, 1.0).logprobs.tolist()) == {0.0}
    start_weights = learner.gather_weights()
    metrics = learner.train_step(collate(samples), replace(COEFFICIENTS, kl=0.0))
    assert metrics.mismatch_kl == metrics.entropy == 0
    if isinstance(algorithm, GrpoConfig):
        assert metrics.grad_norm == 0
        weights = learner.gather_weights()
        assert all(torch.equal(weights[name], start_weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [(GRPO, None), (GRPO, LoraConfig(rank=4, alpha=8.0)), (PpoConfig(kl_coef=0.1), None)],
    ids=["grpo", "lora", "ppo"],
)
def test_sampler_learner_and_reference_agree_before_the_first_update(
    model_path: str, policy: PolicyModel, algorithm: AlgorithmConfig, lora: LoraConfig | None
) -> None:
    samples, entropies = [], []
    for sample in make_restricted_samples():
        micro_batch = pack_one_micro_batch([sample])
        with torch.no_grad():
            output = policy(micro_batch.rows, 1.0, "value")
        logprobs = np.zeros(len(sample.token_ids), dtype=np.float32)
        logprobs[np.asarray(sample.loss_mask)] = output.logprobs.numpy()
        entropies += output.entropies.tolist()
        samples.append(replace(sample, rollout_logprobs=logprobs))
    results = []
    for packing in ("tree", "pad"):
        learner = make_learner(model_path, algorithm, lora, packing=packing)
        metrics = learner.train_step(collate(samples), COEFFICIENTS)
        assert metrics.mismatch_kl == pytest.approx(0, abs=1e-8)
        assert metrics.reference_kl == pytest.approx(0, abs=1e-8)
        assert metrics.entropy == pytest.approx(np.mean(entropies), rel=1e-4)
        results.append((metrics.loss, metrics.grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert results[0][1] > 0
