"""Gradients of whole batches, compared with autograd over all sequences at once.

Ludus: groups --> batch --> packed micro-batches of several ranks --> sum of gradients. The plain
loop: one forward pass for each sequence, the loss of all tokens from its formula, one backward
pass. The model is a GPT-2 whose configuration contains dropout.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from ludus.proto.config import AlgorithmConfig, GrpoConfig, PpoConfig, ReinforceConfig
from ludus.trainer.core.types import (
    Coefficients,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    TokenSequence,
    TurnSpan,
)
from ludus.trainer.data.batch import make_batch
from ludus.trainer.learner.actor_critic import ActorCritic
from ludus.trainer.learner.algorithm import Algorithm
from ludus.trainer.learner.micro_batches import MicroBatchConfig, make_micro_batches
from ludus.trainer.learner.model import PolicyModel, estimate_row_costs
from tests.process_group import open_single_rank_group

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_CASES = 200
TOLERANCE = 1e-5
"""Largest difference of a gradient, relative to its largest number. Log-probs are in float32."""
VOCABULARY, MAX_TOKENS = 20, 32
KL_COEF, ENTROPY_COEF = 0.1, 0.05
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@pytest.fixture(scope="module", autouse=True)
def single_rank_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create a process group of this process, because whitening is a collective."""
    with open_single_rank_group(tmp_path_factory.mktemp("ranks")):
        yield


def make_model(seed: int, *, has_value_head: bool) -> PolicyModel:
    """Return a policy as the learner uses it: in evaluation mode, so without dropout."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=MAX_TOKENS,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, initializer_range=0.3,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = PolicyModel(GPT2LMHeadModel(config), has_value_head=has_value_head).eval()
    if model.value_head is not None:
        torch.nn.init.normal_(model.value_head.weight)
    return model


def make_sequence(generator: random.Random, prefix: Sequence[int] = ()) -> TokenSequence:
    """Return one or two turns after a prefix, with observations around them."""
    token_ids = list(prefix)
    turns: list[TurnSpan] = []
    for _ in range(generator.randint(1, 2)):
        token_ids += [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 3))]
        start = len(token_ids)
        token_ids += [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 4))]
        turns.append(TurnSpan(start, len(token_ids), generator.choice([0.0, 0.5, 1.0])))
    token_ids += [generator.randrange(VOCABULARY) for _ in range(generator.randint(0, 2))]
    logprobs = [generator.uniform(-5, -1) for _ in token_ids]
    return TokenSequence(
        np.array(token_ids, dtype=np.int32), np.array(logprobs, dtype=np.float32), tuple(turns)
    )


def make_rollout(generator: random.Random) -> Rollout:
    """Return an episode of one to three sequences; some are truncated, and some are void."""
    status = generator.choice([*[RolloutStatus.TERMINATED] * 3, RolloutStatus.TRUNCATED])
    sequences = (make_sequence(generator),)
    for _ in range(generator.choice([0, 0, 1, 2])):
        # A branch repeats a part of the first sequence; other sequences repeat nothing.
        prefix = sequences[0].token_ids[: generator.choice([0, 3, 6])].tolist()
        sequences += (make_sequence(generator, prefix),)
    reward: float | None = sum(
        turn.reward for sequence in sequences for turn in sequence.turns
    ) + generator.choice([0.0, 1.0])
    if generator.random() < 0.15:
        status, reward = RolloutStatus.FAILED, None
    return Rollout("game", 0, sequences, reward, reward, (), status, 0)


def make_groups(generator: random.Random) -> list[RolloutGroup]:
    groups = [
        RolloutGroup(index, "game", tuple(make_rollout(generator) for _ in range(2)))
        for index in range(generator.randint(1, 2))
    ]
    return groups if any(reward is not None for group in groups for reward in group.rewards) else (
        make_groups(generator)
    )  # fmt: skip


def compute_ludus_gradient(
    model: PolicyModel,
    reference: PolicyModel,
    groups: Sequence[RolloutGroup],
    config: AlgorithmConfig,
    generator: random.Random,
) -> dict[str, Tensor]:
    """Return the sum of the gradients of all micro-batches of one to three ranks."""
    batch, algorithm = make_batch(groups, config), Algorithm(config, MAX_TOKENS)
    actor_critic, num_ranks = ActorCritic(model, None), generator.randint(1, 3)
    max_tokens = generator.choice([MAX_TOKENS, 100, 1000])
    costs, packs_trees = estimate_row_costs(model.language_model), generator.choice([False, True])
    micro_batches = [
        micro_batch
        for rank in range(num_ranks)
        for micro_batch in make_micro_batches(
            batch,
            np.arange(batch.num_samples),
            MicroBatchConfig(max_tokens, costs, rank, num_ranks, packs_trees),
        )
    ]
    coefficients = Coefficients(0.0, entropy=ENTROPY_COEF, kl=KL_COEF)
    with torch.no_grad():
        targets = [
            algorithm.make_targets(
                micro_batch,
                actor_critic(micro_batch.rows, 1.0),
                reference(micro_batch.rows, 1.0),
                KL_COEF,
            )
            for micro_batch in micro_batches
        ]
    [targets] = algorithm.whiten_targets([targets], [micro_batches])
    counts = torch.from_numpy(batch.num_sampled_tokens[batch.sequence_of_sample])
    model.zero_grad()
    for micro_batch, target in zip(micro_batches, targets, strict=True):
        output = actor_critic(micro_batch.rows, 1.0, "gradient")
        loss = algorithm.compute_loss(micro_batch, output, target, counts, coefficients)
        loss.total_loss.backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
    }


@dataclass
class PlainSequence:
    """The tensors of one sequence in the plain loop."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    last_value: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    old_values: Tensor


def run_plain(model: PolicyModel, sequence: TokenSequence) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and values of the sampled tokens, and the last value."""
    token_ids = torch.from_numpy(sequence.token_ids).long()
    output = model.language_model(token_ids[None], output_hidden_states=True)
    distributions = output.logits[0].log_softmax(-1)
    positions = [index for turn in sequence.turns for index in range(turn.start, turn.end)]
    logprobs = torch.stack([distributions[index - 1, token_ids[index]] for index in positions])
    entropies = torch.stack(
        [-(distributions[index - 1].exp() * distributions[index - 1]).sum() for index in positions]
    )
    values = torch.zeros(len(token_ids))
    if model.value_head is not None:
        values = model.value_head(output.hidden_states[-1][0]).squeeze(-1)
    return logprobs, entropies, values[[index - 1 for index in positions]], values[-1]


def list_episode_advantages(group: RolloutGroup) -> list[float]:
    """Return r - mean(r), 0 in a group without a difference."""
    rewards = [reward for reward in group.rewards if reward is not None]
    if len(set(rewards)) < 2:
        return [0.0] * len(group.rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [0.0 if reward is None else reward - mean for reward in group.rewards]


def list_token_rewards(rollout: Rollout) -> list[list[float]]:
    """Return the rewards of the sampled tokens of each sequence, without later sequences."""
    assert rollout.reward is not None
    rewards: list[list[float]] = []
    for sequence in rollout.sequences:
        rewards.append([])
        for turn in sequence.turns:
            rewards[-1] += [0.0] * (turn.end - turn.start - 1) + [turn.reward]
    rewards[-1][-1] += rollout.reward - sum(map(sum, rewards))
    return rewards


def compute_gae_of_episode(
    rollout: Rollout,
    values: Sequence[Tensor],
    last_values: Sequence[Tensor],
    config: PpoConfig | ReinforceConfig,
) -> list[Tensor]:
    """Return the advantages of each sequence; with REINFORCE++, its returns.

    With a critic, a sequence of a truncated episode continues with the value of its last state.
    Otherwise its last token gets the discounted return of the later sequences.
    """
    has_critic = isinstance(config, PpoConfig)
    gamma, lam = config.gamma, config.lam if has_critic else 1.0
    is_truncated = has_critic and rollout.status is RolloutStatus.TRUNCATED
    all_rewards = list_token_rewards(rollout)
    advantages: list[Tensor] = []
    later_return = 0.0
    for rewards, old_values, last_value in zip(
        all_rewards[::-1], values[::-1], last_values[::-1], strict=True
    ):
        next_value, next_advantage = (float(last_value), 0.0) if is_truncated else (0.0, 0.0)
        row = []
        for t in reversed(range(len(rewards))):
            reward = rewards[t]
            if t == len(rewards) - 1 and not is_truncated:
                reward += gamma * later_return
            delta = reward + gamma * next_value - float(old_values[t])
            next_advantage = delta + gamma * lam * next_advantage
            next_value = float(old_values[t])
            row.append(next_advantage)
        for reward in reversed(rewards):
            later_return = reward + gamma * later_return
        advantages.append(torch.tensor(row[::-1]))
    return advantages[::-1]


def compute_plain_gradient(
    model: PolicyModel,
    reference: PolicyModel,
    groups: Sequence[RolloutGroup],
    config: AlgorithmConfig,
) -> dict[str, Tensor]:
    """Return the gradient of one backward pass over all sequences."""
    sequences: list[PlainSequence] = []
    for group in groups:
        for rollout, advantage in zip(group.rollouts, list_episode_advantages(group), strict=True):
            if rollout.reward is not None:
                sequences += run_episode(model, reference, rollout, advantage, config)
    all_advantages = torch.cat([sequence.advantages for sequence in sequences])
    mean, deviation = all_advantages.mean(), torch.tensor(0.0)
    if len(all_advantages) > 1:
        deviation = all_advantages.std()
    num_tokens, losses = len(all_advantages), []
    for sequence in sequences:
        advantages = sequence.advantages
        if not isinstance(config, GrpoConfig):
            advantages = (advantages - mean) / (deviation + 1e-8)
        losses.append(compute_sequence_loss(sequence, advantages, config))
    row_means = [loss.mean() for loss in losses]
    total = torch.cat(losses).sum()
    loss = {
        "token_mean": total / num_tokens,
        "sequence_mean": torch.stack(row_means).mean(),
        "constant": total / (len(losses) * MAX_TOKENS),
    }[config.aggregation]
    if isinstance(config, PpoConfig):
        errors = [
            (sequence.values - (sequence.advantages + sequence.old_values)) ** 2
            for sequence in sequences
        ]
        loss = loss + config.value_coef * 0.5 * torch.cat(errors).mean()
    model.zero_grad()
    loss.backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
    }


def run_episode(
    model: PolicyModel,
    reference: PolicyModel,
    rollout: Rollout,
    advantage: float,
    config: AlgorithmConfig,
) -> list[PlainSequence]:
    outputs = [run_plain(model, sequence) for sequence in rollout.sequences]
    old_values = [values.detach() for _, _, values, _ in outputs]
    if not isinstance(config, GrpoConfig):
        last_values = [last_value.detach() for _, _, _, last_value in outputs]
        advantages = compute_gae_of_episode(rollout, old_values, last_values, config)
    else:
        advantages = [torch.full_like(values, advantage) for values in old_values]
    plain_sequences = []
    for sequence, output, row, values in zip(
        rollout.sequences, outputs, advantages, old_values, strict=True
    ):
        with torch.no_grad():
            ref_logprobs, *_ = run_plain(reference, sequence)
        rollout_logprobs = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
        plain_sequences.append(PlainSequence(*output, ref_logprobs, rollout_logprobs, row, values))
    return plain_sequences


def compute_sequence_loss(
    sequence: PlainSequence, advantages: Tensor, config: AlgorithmConfig
) -> Tensor:
    """Return the losses of the tokens: the ratio is 1, and the weight corrects for the sampler."""
    old_logprobs = sequence.logprobs.detach()
    if config.old_logprobs == "rollout":
        old_logprobs = sequence.rollout_logprobs
    ratio = (sequence.logprobs - old_logprobs).exp()
    clipped_ratio = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    losses = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if config.correction.kind == "token_tis":
        weights = (old_logprobs - sequence.rollout_logprobs).exp().clamp(max=2.0)
        losses = weights * losses
    difference = sequence.ref_logprobs - sequence.logprobs
    divergence = difference.exp() - difference - 1
    return losses + KL_COEF * divergence - ENTROPY_COEF * sequence.entropies


def make_config(kind: str, generator: random.Random) -> AlgorithmConfig:
    is_recomputed = generator.random() < 0.5
    settings = {
        "loss": {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "dual_clip": None},
        "correction": {"kind": "token_tis", "cap": 2.0} if is_recomputed else {"kind": "off"},
        "old_logprobs": "recompute" if is_recomputed else "rollout",
        "geometric_mask": None,
        "aggregation": generator.choice(["token_mean", "sequence_mean", "constant"]),
        "kl_coef": KL_COEF,
    }
    if kind == "grpo":
        return GrpoConfig.model_validate(settings)
    settings["gamma"] = generator.choice([1.0, 0.9])
    if kind == "reinforce":
        return ReinforceConfig.model_validate(settings)
    settings |= {"lam": generator.choice([1.0, 0.8]), "value_clip": None}
    return PpoConfig.model_validate(settings)


@pytest.mark.parametrize("kind", ["grpo", "reinforce", "ppo"])
def test_gradient_of_a_batch_equals_that_of_a_plain_loop(kind: str) -> None:
    for seed in range(NUM_CASES):
        generator = random.Random(seed)
        if seed % 20 == 0:
            model = make_model(seed, has_value_head=kind == "ppo")
            reference = make_model(seed + 1, has_value_head=False)
        groups, config = make_groups(generator), make_config(kind, generator)
        expected = compute_plain_gradient(model, reference, groups, config)
        actual = compute_ludus_gradient(model, reference, groups, config, generator)
        scale = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            difference = float((actual[name] - gradient).abs().max())
            assert difference <= TOLERANCE * max(1.0, scale), (seed, name)
