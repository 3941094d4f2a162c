from __future__ import annotations

from dataclasses import astuple, fields, replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ludus.proto.config import (
    AlgorithmConfig,
    CispoLoss,
    ClipLoss,
    GrpoConfig,
    GspoLoss,
    IcePop,
    NoCorrection,
    PpoConfig,
    ReinforceConfig,
    SequenceMask,
    SequenceTis,
    TokenTis,
)
from ludus.trainer.algorithms.advantages import group_advantages
from ludus.trainer.algorithms.losses import (
    LossInputs,
    LossTerms,
    aggregate,
    entropy,
    loss_denominator,
    policy_gradient_loss,
    token_logprobs,
)

if TYPE_CHECKING:
    from conftest import RaggedBatch

CLIP = GrpoConfig(
    loss=ClipLoss(clip_high=0.2, dual_clip=None), correction=NoCorrection(), geometric_mask=None
)
KL_CLIP = GrpoConfig(kl_coef=0.1, entropy_coef=0.01)
GSPO = GrpoConfig(
    loss=GspoLoss(), correction=SequenceTis(), aggregation="sequence_mean", kl_coef=0.1
)
DR_GRPO = GrpoConfig(aggregation="constant", correction=TokenTis(cap=1.1))
CISPO = GrpoConfig(loss=CispoLoss(clip_high=0.1), kl_coef=0.1, kl_estimator="k2")
SEQUENCE_MASK = GrpoConfig(correction=SequenceMask(cap=1.04), aggregation="sequence_mean")
ICEPOP = ReinforceConfig(correction=IcePop(low=0.9, high=1.04), entropy_coef=0.1)
PPO = PpoConfig(kl_coef=0.1, kl_placement="reward", kl_estimator="k1")
RATIO_ONE_CONFIGS = [
    GrpoConfig(),
    CLIP,
    DR_GRPO,
    GSPO.model_copy(update={"kl_coef": 0.0}),
    GrpoConfig(loss=CispoLoss()),
    ReinforceConfig(correction=IcePop()),
    PpoConfig(correction=SequenceMask(), aggregation="sequence_mean"),
]
CONFIGS = [CLIP, KL_CLIP, GSPO, DR_GRPO, CISPO, SEQUENCE_MASK, ICEPOP, PPO]


def compute_terms(
    batch: RaggedBatch,
    config: AlgorithmConfig,
    rows: list[int] | None = None,
    logprobs: Tensor | None = None,
    scale: str = "none",
) -> LossTerms:
    """Return the loss terms of the selected rows, with the denominator of all rows."""
    rows = rows if rows is not None else [0, 1, 2, 3]
    all_logprobs = batch.logprobs if logprobs is None else logprobs
    return policy_gradient_loss(
        LossInputs(
            logprobs=all_logprobs[rows],
            old_logprobs=batch.old_logprobs[rows],
            rollout_logprobs=batch.rollout_logprobs[rows],
            ref_logprobs=batch.ref_logprobs[rows],
            entropies=-all_logprobs[rows],
            advantages=group_advantages(batch.rewards[None], scale=scale).T[rows],
            mask=batch.mask[rows],
        ),
        config,
        denominator=loss_denominator(batch.mask.sum(-1), config.aggregation, max_tokens=8),
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef,
    )


def compute_gradient(batch: RaggedBatch, config: AlgorithmConfig, parts: list[list[int]]) -> Tensor:
    """Return the gradient, accumulated over the parts of the batch."""
    logprobs = batch.logprobs.clone().requires_grad_()
    for rows in parts:
        compute_terms(batch, config, rows, logprobs).loss.backward()
    return logprobs.grad


def test_loss_terms_equal_the_reference_numbers(ragged_batch: RaggedBatch) -> None:
    kl_config = CLIP.model_copy(update={"kl_coef": 0.5})
    tis_config = CLIP.model_copy(update={"correction": TokenTis(cap=2.0)})
    assert compute_terms(ragged_batch, CLIP).loss.item() == pytest.approx(-0.0832437, abs=5.1e-8)
    assert compute_terms(ragged_batch, tis_config).loss.item() == pytest.approx(
        -0.0801720, abs=5.1e-8
    )
    assert compute_terms(ragged_batch, kl_config).loss.item() == pytest.approx(
        -0.0832437 + 0.5 * 0.0348619, abs=1.1e-7
    )


@pytest.mark.parametrize(
    ("config", "scale", "expected"),
    [
        (CLIP, "none", -0.0832437),
        (CLIP.model_copy(update={"aggregation": "sequence_mean"}), "none", -0.0113098),
        (CLIP.model_copy(update={"aggregation": "constant"}), "none", -0.0260137),
        (CLIP, "group", -0.1738541),
        (CLIP.model_copy(update={"aggregation": "sequence_mean"}), "group", -0.0236205),
        (CLIP.model_copy(update={"aggregation": "constant"}), "group", -0.0543294),
        (
            GSPO.model_copy(update={"kl_coef": 0.0, "correction": NoCorrection()}),
            "none",
            -0.0001031,
        ),
    ],
)
def test_loss_of_the_shared_batch_equals_the_reference_table(
    ragged_batch: RaggedBatch, config: AlgorithmConfig, scale: str, expected: float
) -> None:
    assert compute_terms(ragged_batch, config, scale=scale).loss.item() == pytest.approx(
        expected, abs=5.1e-8
    )


def test_metrics_are_sums_over_the_sampled_tokens(ragged_batch: RaggedBatch) -> None:
    terms = compute_terms(ragged_batch, CLIP)
    mask = ragged_batch.mask
    log_ratio = (ragged_batch.old_logprobs - ragged_batch.rollout_logprobs)[mask]
    assert terms.num_tokens == 10
    # Rows 1 and 4 have positive advantages. Tokens 1 and 4 of row 1, and the token of row 4, have
    # ratios above 1.2. In rows 2 and 3, no ratio is below 0.8: the lowest is exp(-.2) = .819.
    assert terms.num_clipped_tokens == 3
    assert terms.num_masked_sequences == 0 and terms.num_masked_tokens == 0
    assert terms.ref_kl_sum.item() == pytest.approx(10 * 0.0348619, abs=1e-6)
    torch.testing.assert_close(terms.entropy_sum, -ragged_batch.logprobs[mask].sum())
    torch.testing.assert_close(terms.mismatch_kl_sum, (log_ratio.expm1() - log_ratio).sum())
    assert terms.loss.dim() == 0


@pytest.mark.parametrize("config", CONFIGS)
def test_masked_tokens_may_be_nan_and_have_zero_gradient(
    ragged_batch: RaggedBatch, config: AlgorithmConfig
) -> None:
    assert ragged_batch.logprobs[~ragged_batch.mask].isnan().all()
    gradients = compute_gradient(ragged_batch, config, [[0, 1, 2, 3]])
    assert (gradients[~ragged_batch.mask] == 0).all()
    assert gradients.isfinite().all() and gradients[ragged_batch.mask].any()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3]], [[3, 0], [2, 1]], [[1, 2, 3], [0]]])
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(
    ragged_batch: RaggedBatch, config: AlgorithmConfig, parts: list[list[int]]
) -> None:
    expected = compute_terms(ragged_batch, config)
    part_terms = [compute_terms(ragged_batch, config, rows) for rows in parts]
    for name in LossTerms.__dataclass_fields__:
        total = torch.stack([getattr(terms, name) for terms in part_terms]).sum()
        torch.testing.assert_close(total, getattr(expected, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        compute_gradient(ragged_batch, config, parts),
        compute_gradient(ragged_batch, config, [[0, 1, 2, 3]]),
        atol=1e-12,
        rtol=0,
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_padding_has_no_effect(ragged_batch: RaggedBatch, config: AlgorithmConfig) -> None:
    padding = {
        f.name: torch.zeros(4, 5).to(getattr(ragged_batch, f.name).dtype)
        for f in fields(ragged_batch)
    }
    tensors = {
        name: torch.cat([getattr(ragged_batch, name), padding[name]], dim=1)
        for name in padding
        if name != "rewards"
    }
    torch.testing.assert_close(
        astuple(compute_terms(replace(ragged_batch, **tensors), config)),
        astuple(compute_terms(ragged_batch, config)),
    )


def test_masked_sequence_has_no_gradient_but_stays_in_the_denominator(
    ragged_batch: RaggedBatch,
) -> None:
    rollout_logprobs = ragged_batch.rollout_logprobs.clone()
    rollout_logprobs[1] -= 1.0  # The mean log-ratio of row 2 is now 1.025, and e^1.025 > 2.
    batch = replace(ragged_batch, rollout_logprobs=rollout_logprobs)
    masked_config = KL_CLIP.model_copy(update={"correction": NoCorrection()})
    unmasked_config = masked_config.model_copy(update={"geometric_mask": None})
    one_part = [[0, 1, 2, 3]]

    assert compute_terms(batch, masked_config).num_masked_sequences == 1
    assert compute_terms(batch, masked_config).num_masked_tokens == 2
    assert compute_terms(batch, masked_config).num_tokens == 10
    expected = compute_gradient(batch, unmasked_config, one_part)
    expected[1] = 0.0
    assert torch.equal(compute_gradient(batch, masked_config, one_part), expected)


def test_correction_weights_scale_the_gradient_but_are_constants(ragged_batch: RaggedBatch) -> None:
    cap = 1.04
    weighted_config = CLIP.model_copy(update={"correction": TokenTis(cap=cap)})
    rollout_logprobs = ragged_batch.rollout_logprobs.clone().requires_grad_()
    old_logprobs = ragged_batch.old_logprobs.clone().requires_grad_()
    batch = replace(ragged_batch, rollout_logprobs=rollout_logprobs, old_logprobs=old_logprobs)
    gradients = compute_gradient(batch, weighted_config, [[0, 1, 2, 3]])
    assert rollout_logprobs.grad is None and old_logprobs.grad is None
    weight = (ragged_batch.old_logprobs - ragged_batch.rollout_logprobs).exp().clamp(max=cap)
    expected = compute_gradient(ragged_batch, CLIP, [[0, 1, 2, 3]]) * weight
    torch.testing.assert_close(gradients[ragged_batch.mask], expected[ragged_batch.mask])


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from(RATIO_ONE_CONFIGS))
def test_gradient_at_ratio_one_equals_the_reinforce_gradient(
    seed: int, config: AlgorithmConfig
) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    actions = torch.randint(6, (4, 5), generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    mask[0, 0] = True
    advantages = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    policy = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)

    logprobs = token_logprobs(features @ policy, actions)
    denominator = loss_denominator(mask.sum(-1), config.aggregation, max_tokens=8)
    reinforce_loss = aggregate(-advantages * logprobs, mask, config.aggregation, denominator)
    terms = policy_gradient_loss(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            rollout_logprobs=logprobs.detach(),
            ref_logprobs=None,
            entropies=entropy((features @ policy).log_softmax(-1)),
            advantages=advantages,
            mask=mask,
        ),
        config,
        denominator=denominator,
        entropy_coef=0.0,
        kl_coef=0.0,
    )
    (expected,) = torch.autograd.grad(reinforce_loss, policy, retain_graph=True)
    (gradients,) = torch.autograd.grad(terms.loss, policy)
    torch.testing.assert_close(gradients, expected)
    assert terms.num_clipped_tokens == 0 and terms.mismatch_kl_sum == 0 and terms.ref_kl_sum == 0


@pytest.mark.slow
def test_entropy_bonus_alone_leads_to_a_uniform_policy() -> None:
    logits = torch.tensor([[[2.0, 0.0, -1.0]]], requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    for _ in range(40):
        optimizer.zero_grad()
        logprobs = token_logprobs(logits, torch.tensor([[0]]))
        policy_gradient_loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach(),
                rollout_logprobs=logprobs,
                ref_logprobs=None,
                entropies=entropy(logits.log_softmax(-1)),
                advantages=torch.zeros(1, 1),
                mask=torch.tensor([[True]]),
            ),
            GrpoConfig(),
            denominator=1,
            entropy_coef=0.5,
            kl_coef=0.0,
        ).loss.backward()
        optimizer.step()
    torch.testing.assert_close(logits.softmax(-1), torch.full((1, 1, 3), 1 / 3), atol=1e-3, rtol=0)


def test_cispo_multiplies_each_gradient_by_the_clipped_ratio(
    ragged_batch: RaggedBatch,
) -> None:
    config = CLIP.model_copy(update={"loss": CispoLoss(clip_low=0.2, clip_high=0.1)})
    gradients = compute_gradient(ragged_batch, config, [[0, 1, 2, 3]])
    ratio = (ragged_batch.logprobs - ragged_batch.old_logprobs).exp()
    advantages = group_advantages(ragged_batch.rewards[None]).T
    expected = -ratio.clamp(0.8, 1.1) * advantages / 10
    torch.testing.assert_close(gradients[ragged_batch.mask], expected[ragged_batch.mask])
    num_clipped = ((ratio < 0.8) | (ratio > 1.1))[ragged_batch.mask].sum()
    assert compute_terms(ragged_batch, config).num_clipped_tokens == num_clipped > 0


def test_dual_clip_bounds_the_loss_of_tokens_with_negative_advantage(
    ragged_batch: RaggedBatch,
) -> None:
    bound = 1.05
    config = CLIP.model_copy(
        update={"loss": ClipLoss(clip_low=0.2, clip_high=0.2, dual_clip=bound)}
    )
    ratio = (ragged_batch.logprobs - ragged_batch.old_logprobs).exp()
    advantages = group_advantages(ragged_batch.rewards[None]).T.expand(4, 4)
    loss_reduction = (ratio - bound).clamp(min=0) * advantages.clamp(max=0)
    assert loss_reduction[ragged_batch.mask].any()
    torch.testing.assert_close(
        compute_terms(ragged_batch, config).loss,
        compute_terms(ragged_batch, CLIP).loss + loss_reduction[ragged_batch.mask].sum() / 10,
    )


def test_sequence_above_the_sequence_mask_cap_has_no_policy_gradient(
    ragged_batch: RaggedBatch,
) -> None:
    # The weights of the rows are .951, 1.051, 1 and 1.051, as in the reference numbers.
    config = CLIP.model_copy(update={"correction": SequenceMask(cap=1.04)})
    plain_gradient = compute_gradient(ragged_batch, CLIP, [[0, 1, 2, 3]])
    gradients = compute_gradient(ragged_batch, config, [[0, 1, 2, 3]])
    weights = torch.tensor([[0.9512294], [0.0], [1.0], [0.0]], dtype=torch.float64)
    expected = torch.where(ragged_batch.mask, plain_gradient * weights, 0.0)
    torch.testing.assert_close(gradients, expected, atol=1e-8, rtol=0)
    terms = compute_terms(ragged_batch, config)
    assert terms.num_masked_sequences == 2 and terms.num_masked_tokens == 3
    assert terms.num_tokens == 10, "masked tokens were not counted"


def test_icepop_masks_individual_tokens(ragged_batch: RaggedBatch) -> None:
    config = CLIP.model_copy(update={"correction": IcePop(low=0.94, high=1.06)})
    ratio = (ragged_batch.old_logprobs - ragged_batch.rollout_logprobs).exp()
    is_masked = ((ratio < 0.94) | (ratio > 1.06)) & ragged_batch.mask
    assert compute_terms(ragged_batch, config).num_masked_tokens == is_masked.sum() > 0
    assert not compute_gradient(ragged_batch, config, [[0, 1, 2, 3]])[is_masked].any()


def test_kl_penalty_placed_in_the_reward_is_not_added_to_the_loss(
    ragged_batch: RaggedBatch,
) -> None:
    no_kl_ppo = PPO.model_copy(update={"kl_coef": 0.0})
    assert compute_terms(ragged_batch, PPO).loss == compute_terms(ragged_batch, no_kl_ppo).loss
    assert compute_terms(ragged_batch, PPO).ref_kl_sum > 0, "the divergence was not measured"


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_loss_uses_the_configured_kl_estimator(ragged_batch: RaggedBatch, estimator: str) -> None:
    config = CLIP.model_copy(update={"kl_coef": 0.5, "kl_estimator": estimator})
    log_ratio = (ragged_batch.ref_logprobs - ragged_batch.logprobs)[ragged_batch.mask]
    divergence = log_ratio.square() / 2 if estimator == "k2" else log_ratio.expm1() - log_ratio
    kl_loss = compute_terms(ragged_batch, config).loss - compute_terms(ragged_batch, CLIP).loss
    torch.testing.assert_close(kl_loss, 0.5 * divergence.mean())


def test_packed_sequences_have_the_same_loss_as_separate_rows(
    ragged_batch: RaggedBatch,
) -> None:
    """Compare only per-token terms: per-sequence terms need separate rows."""
    config = KL_CLIP.model_copy(update={"geometric_mask": None})
    expected, advantages = (
        compute_terms(ragged_batch, config),
        group_advantages(ragged_batch.rewards[None]).T,
    )
    mask = ragged_batch.mask

    def pack(values: Tensor) -> Tensor:
        return values[mask][None]

    packed_terms = policy_gradient_loss(
        LossInputs(
            logprobs=pack(ragged_batch.logprobs),
            old_logprobs=pack(ragged_batch.old_logprobs),
            rollout_logprobs=pack(ragged_batch.rollout_logprobs),
            ref_logprobs=pack(ragged_batch.ref_logprobs),
            entropies=pack(-ragged_batch.logprobs),
            advantages=pack(advantages.expand(4, 4)),
            mask=pack(mask),
        ),
        config,
        denominator=10,
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef,
    )
    torch.testing.assert_close(packed_terms.loss, expected.loss)
    torch.testing.assert_close(packed_terms.mismatch_kl_sum, expected.mismatch_kl_sum)


def test_advantages_have_no_gradient(ragged_batch: RaggedBatch) -> None:
    advantages = torch.ones(4, 1, dtype=torch.float64, requires_grad=True)
    logprobs = ragged_batch.logprobs.clone().requires_grad_()
    policy_gradient_loss(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            rollout_logprobs=ragged_batch.rollout_logprobs,
            ref_logprobs=None,
            entropies=torch.zeros(4, 4),
            advantages=advantages,
            mask=ragged_batch.mask,
        ),
        CLIP,
        denominator=10,
        entropy_coef=0.0,
        kl_coef=0.0,
    ).loss.backward()
    assert advantages.grad is None and logprobs.grad is not None
