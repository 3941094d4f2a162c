from __future__ import annotations

from dataclasses import astuple, fields, replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ludus.proto.config import ClipLoss, GrpoConfig, GspoLoss, NoCorrection, SequenceTis, TokenTis
from ludus.trainer.algorithms.advantages import group_advantages
from ludus.trainer.algorithms.aggregation import loss_denominator
from ludus.trainer.algorithms.logits import entropy, token_logprobs
from ludus.trainer.algorithms.policy_loss import LossTerms, grpo_loss

if TYPE_CHECKING:
    from conftest import RaggedBatch

PLAIN = GrpoConfig(
    loss=ClipLoss(clip_high=0.2, dual_clip=None), correction=NoCorrection(), geometric_mask=None
)
EVERYTHING = GrpoConfig(kl_coef=0.1, entropy_coef=0.01)
GSPO = GrpoConfig(
    loss=GspoLoss(), correction=SequenceTis(), aggregation="sequence_mean", kl_coef=0.1
)
CONSTANT = GrpoConfig(aggregation="constant", correction=TokenTis(cap=1.1))
CONFIGS = [PLAIN, EVERYTHING, GSPO, CONSTANT]


def run(
    batch: RaggedBatch,
    config: GrpoConfig,
    rows: list[int] | None = None,
    logprobs: Tensor | None = None,
) -> LossTerms:
    """The loss of some rows of the batch, as a part of the whole."""
    rows = rows if rows is not None else [0, 1, 2, 3]
    new = batch.logprobs if logprobs is None else logprobs
    return grpo_loss(
        logprobs=new[rows],
        old_logprobs=batch.old_logprobs[rows],
        rollout_logprobs=batch.rollout_logprobs[rows],
        ref_logprobs=batch.ref_logprobs[rows],
        entropy=-new[rows],
        advantages=group_advantages(batch.rewards[None])[0][rows],
        loss_mask=batch.mask[rows],
        config=config,
        denominator=loss_denominator(batch.mask, config.aggregation, max_tokens=8),
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef,
    )


def gradient(batch: RaggedBatch, config: GrpoConfig, parts: list[list[int]]) -> Tensor:
    """The gradient that accumulates over the parts."""
    logprobs = batch.logprobs.clone().requires_grad_()
    for rows in parts:
        run(batch, config, rows, logprobs).loss.backward()
    return logprobs.grad


def test_the_parts_of_the_loss_add_up_to_the_reference_numbers(ragged: RaggedBatch) -> None:
    with_kl = PLAIN.model_copy(update={"kl_coef": 0.5})
    with_tis = PLAIN.model_copy(update={"correction": TokenTis(cap=2.0)})
    assert run(ragged, PLAIN).loss.item() == pytest.approx(-0.0832437, abs=5.1e-8)
    assert run(ragged, with_tis).loss.item() == pytest.approx(-0.0801720, abs=5.1e-8)
    assert run(ragged, with_kl).loss.item() == pytest.approx(
        -0.0832437 + 0.5 * 0.0348619, abs=1.1e-7
    )


def test_metrics_are_sums_over_the_sampled_tokens(ragged: RaggedBatch) -> None:
    terms = run(ragged, PLAIN)
    mask = ragged.mask
    mismatch = (ragged.old_logprobs - ragged.rollout_logprobs)[mask]
    assert terms.num_tokens == 10
    # Ratios beyond 1.2 on good rows: tokens 1 and 4 of row 1 and the token of row 4;
    # below 0.8 on bad rows: token 2 of row 3 is at exp(-.2) = .819, token 1 of row 2 as well.
    assert terms.num_clipped_tokens == 3
    assert terms.num_masked_sequences == 0
    assert terms.ref_kl_sum.item() == pytest.approx(10 * 0.0348619, abs=1e-6)
    torch.testing.assert_close(terms.entropy_sum, -ragged.logprobs[mask].sum())
    torch.testing.assert_close(terms.mismatch_kl_sum, (mismatch.expm1() - mismatch).sum())
    assert terms.loss.dim() == 0


@pytest.mark.parametrize("config", CONFIGS)
def test_masked_tokens_have_exactly_zero_gradient_and_may_hold_nan(
    ragged: RaggedBatch, config: GrpoConfig
) -> None:
    assert ragged.logprobs[~ragged.mask].isnan().all()
    result = gradient(ragged, config, [[0, 1, 2, 3]])
    assert (result[~ragged.mask] == 0).all()
    assert result.isfinite().all() and result[ragged.mask].any()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3]], [[3, 0], [2, 1]], [[1, 2, 3], [0]]])
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(
    ragged: RaggedBatch, config: GrpoConfig, parts: list[list[int]]
) -> None:
    whole = run(ragged, config)
    split = [run(ragged, config, rows) for rows in parts]
    for name in LossTerms.__dataclass_fields__:
        total = torch.stack([getattr(terms, name) for terms in split]).sum()
        torch.testing.assert_close(total, getattr(whole, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradient(ragged, config, parts),
        gradient(ragged, config, [[0, 1, 2, 3]]),
        atol=1e-12,
        rtol=0,
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_padding_a_batch_wider_changes_nothing(ragged: RaggedBatch, config: GrpoConfig) -> None:
    filler = {f.name: torch.zeros(4, 5).to(getattr(ragged, f.name).dtype) for f in fields(ragged)}
    wider = {
        name: torch.cat([getattr(ragged, name), filler[name]], dim=1)
        for name in filler
        if name != "rewards"
    }
    torch.testing.assert_close(
        astuple(run(replace(ragged, **wider), config)), astuple(run(ragged, config))
    )


def test_a_masked_sequence_gives_no_gradient_and_does_not_enlarge_the_step(
    ragged: RaggedBatch,
) -> None:
    rollout = ragged.rollout_logprobs.clone()
    rollout[1] -= 1.0  # mean log-ratio of row 2 becomes 1.025: e^1.025 > 2
    batch = replace(ragged, rollout_logprobs=rollout)
    masked = EVERYTHING.model_copy(update={"correction": NoCorrection()})
    unmasked = masked.model_copy(update={"geometric_mask": None})
    everyone = [[0, 1, 2, 3]]

    assert run(batch, masked).num_masked_sequences == 1
    assert run(batch, masked).num_tokens == 10
    expected = gradient(batch, unmasked, everyone)
    expected[1] = 0.0
    assert torch.equal(gradient(batch, masked, everyone), expected)


def test_correction_weights_scale_the_gradient_and_get_none(ragged: RaggedBatch) -> None:
    cap = 1.04
    weighted = PLAIN.model_copy(update={"correction": TokenTis(cap=cap)})
    rollout = ragged.rollout_logprobs.clone().requires_grad_()
    old = ragged.old_logprobs.clone().requires_grad_()
    batch = replace(ragged, rollout_logprobs=rollout, old_logprobs=old)
    result = gradient(batch, weighted, [[0, 1, 2, 3]])
    assert rollout.grad is None and old.grad is None
    weight = (ragged.old_logprobs - ragged.rollout_logprobs).exp().clamp(max=cap)
    expected = gradient(ragged, PLAIN, [[0, 1, 2, 3]]) * weight
    torch.testing.assert_close(result[ragged.mask], expected[ragged.mask])


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from([GrpoConfig(), PLAIN]))
def test_at_ratio_one_the_gradient_is_that_of_reinforce(seed: int, config: GrpoConfig) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    actions = torch.randint(6, (4, 5), generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    mask[0, 0] = True
    advantages = torch.randn(4, generator=generator, dtype=torch.float64)
    policy = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)

    logprobs = token_logprobs(features @ policy, actions)
    reinforce = -(advantages[:, None] * logprobs)[mask].mean()
    terms = grpo_loss(
        logprobs=logprobs,
        old_logprobs=None,
        rollout_logprobs=logprobs.detach(),
        ref_logprobs=None,
        entropy=entropy(features @ policy),
        advantages=advantages,
        loss_mask=mask,
        config=config,
        denominator=loss_denominator(mask, "token_mean"),
        entropy_coef=0.0,
        kl_coef=0.0,
    )
    (expected,) = torch.autograd.grad(reinforce, policy, retain_graph=True)
    (actual,) = torch.autograd.grad(terms.loss, policy)
    torch.testing.assert_close(actual, expected)
    assert terms.num_clipped_tokens == 0 and terms.mismatch_kl_sum == 0 and terms.ref_kl_sum == 0


def test_the_entropy_bonus_makes_a_uniform_policy_the_minimum() -> None:
    logits = torch.tensor([[[2.0, 0.0, -1.0]]], requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    for _ in range(40):
        optimizer.zero_grad()
        logprobs = token_logprobs(logits, torch.tensor([[0]]))
        grpo_loss(
            logprobs=logprobs,
            old_logprobs=None,
            rollout_logprobs=logprobs,
            ref_logprobs=None,
            entropy=entropy(logits),
            advantages=torch.zeros(1),
            loss_mask=torch.tensor([[True]]),
            config=GrpoConfig(),
            denominator=1,
            entropy_coef=0.5,
            kl_coef=0.0,
        ).loss.backward()
        optimizer.step()
    torch.testing.assert_close(logits.softmax(-1), torch.full((1, 1, 3), 1 / 3), atol=1e-3, rtol=0)


def test_a_kl_coefficient_without_reference_logprobs_is_refused(ragged: RaggedBatch) -> None:
    with pytest.raises(ValueError, match=r"ref_logprobs expected a tensor for kl_coef = 0\.1"):
        grpo_loss(
            logprobs=ragged.logprobs,
            old_logprobs=None,
            rollout_logprobs=ragged.rollout_logprobs,
            ref_logprobs=None,
            entropy=ragged.logprobs,
            advantages=ragged.rewards,
            loss_mask=ragged.mask,
            config=EVERYTHING,
            denominator=10,
            entropy_coef=0.0,
            kl_coef=0.1,
        )
