"""Tests that algorithms learn a guessing game, and do not learn from shuffled rewards."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ludus.proto.config import (
    AlgorithmConfig,
    CispoLoss,
    GrpoConfig,
    GspoLoss,
    IcePop,
    NoCorrection,
    PpoConfig,
    ReinforceConfig,
    SequenceMask,
    SequenceTis,
)
from ludus.trainer.algorithms.advantages import (
    critic_targets,
    discounted_returns,
    gae,
    kl_penalty,
    moments,
    whiten,
)
from ludus.trainer.algorithms.losses import (
    LossInputs,
    entropy,
    loss_denominator,
    policy_gradient_loss,
    token_logprobs,
    value_loss,
)
from ludus.trainer.core.types import (
    Batch,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    SampledCompletion,
    Turn,
    join_turns,
)
from ludus.trainer.data.batch import make_batch, shuffle_rewards

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_PROMPTS = 4
NUM_TURNS = 2
VOCAB_SIZE = 16
"""Number of token ids: 0..3 are first-turn prompts, 4..7 second-turn prompts, 8..11 completions."""
GROUP_SIZE = 8
NUM_GROUPS = 8
NUM_STEPS = 20

REWARD_KL_SETTINGS = {"kl_placement": "reward", "kl_coef": 0.01, "kl_estimator": "k1"}


@pytest.fixture(autouse=True)
def use_one_thread() -> Iterator[None]:
    """Use one thread, which is faster for small tensors."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class TabularPolicy(torch.nn.Module):
    """A policy and a critic that depend only on the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(VOCAB_SIZE, VOCAB_SIZE))
        self.values = torch.nn.Parameter(torch.zeros(VOCAB_SIZE))
        mask = torch.full((VOCAB_SIZE,), -1e9)
        mask[8:12] = 0.0
        self.register_buffer("completion_mask", mask)

    def evaluate(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs, entropies and values [N, T] of each token, given the previous token."""
        previous_ids = torch.cat([token_ids[:, :1], token_ids[:, :-1]], dim=1)
        logits = self.logits[previous_ids] + self.completion_mask
        return (
            token_logprobs(logits, token_ids),
            entropy(logits.log_softmax(-1)),
            self.values[previous_ids],
        )


@torch.no_grad()
def play_groups(policy: TabularPolicy, generator: torch.Generator) -> list[RolloutGroup]:
    """Play groups whose episodes have the same prompts; a correct completion has reward 1."""
    shape = (NUM_GROUPS, 1, NUM_TURNS)
    prompt_numbers = torch.randint(NUM_PROMPTS, shape, generator=generator).expand(
        -1, GROUP_SIZE, -1
    )
    prompts = prompt_numbers + torch.tensor([0, 4])
    all_logprobs = (policy.logits[prompts] + policy.completion_mask).log_softmax(-1)
    probabilities = all_logprobs.exp().view(-1, VOCAB_SIZE)
    actions = torch.multinomial(probabilities, 1, generator=generator).view(prompts.shape)
    logprobs = all_logprobs.gather(-1, actions[..., None])[..., 0]
    rewards = (actions == prompt_numbers + 8).float()
    return [
        RolloutGroup(
            index,
            "guess",
            tuple(
                _make_rollout(
                    prompts[index, i], actions[index, i], logprobs[index, i], rewards[index, i]
                )
                for i in range(GROUP_SIZE)
            ),
        )
        for index in range(NUM_GROUPS)
    ]


def _make_rollout(prompts: Tensor, actions: Tensor, logprobs: Tensor, rewards: Tensor) -> Rollout:
    turns = [
        Turn([prompt], SampledCompletion([action], [logprob], 0, has_end_token=True), reward)
        for prompt, action, logprob, reward in zip(
            prompts.tolist(), actions.tolist(), logprobs.tolist(), rewards.tolist(), strict=True
        )
    ]
    total_reward = float(rewards.sum())
    return Rollout(
        "guess",
        0,
        (join_turns(turns),),
        total_reward,
        total_reward,
        (),
        RolloutStatus.TERMINATED,
        0,
    )


def pad_rows(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return token ids, mask, rollout log-probs, advantages and rewards, [N, T] each."""
    sequence_ids = batch.sequence_of_sample.tolist()
    columns = (
        [batch.sequences[i] for i in sequence_ids],
        [batch.loss_masks[i] for i in sequence_ids],
        batch.rollout_logprobs,
        batch.advantages,
        batch.rewards,
    )
    token_ids, mask, rollout_logprobs, advantages, rewards = (
        pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True) for rows in columns
    )
    return token_ids, mask, rollout_logprobs, advantages, rewards


def train_step(
    policy: TabularPolicy, optimizer: torch.optim.Optimizer, batch: Batch, config: AlgorithmConfig
) -> None:
    """Update the policy twice on the same rows, so that the second update is off-policy."""
    token_ids, mask, rollout_logprobs, advantages, rewards = pad_rows(batch)
    with torch.no_grad():
        old_logprobs, _, old_values = policy.evaluate(token_ids)
        ref_logprobs = torch.full_like(old_logprobs, 1 / 4).log()
        if config.kl_placement == "reward":
            penalty = kl_penalty(old_logprobs, ref_logprobs, mask, config.kl_coef)
            rewards = rewards + penalty
            advantages = advantages + discounted_returns(penalty, mask, 1.0)
        targets = torch.zeros_like(old_logprobs)
        if isinstance(config, PpoConfig):
            terminated, zeros = torch.from_numpy(batch.terminated), torch.zeros(len(token_ids))
            advantages = gae(rewards, old_values, mask, terminated, zeros, config.gamma, config.lam)
            targets = critic_targets(advantages, old_values, mask)
        if isinstance(config, PpoConfig) or config.kl_placement == "reward":
            advantages = whiten(advantages, mask, moments(advantages, mask))
    denominator = loss_denominator(mask.sum(-1), config.aggregation, max_tokens=4)
    for _ in range(2):
        logprobs, entropies, values = policy.evaluate(token_ids)
        loss = policy_gradient_loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=rollout_logprobs if config.old_logprobs == "rollout" else old_logprobs,
                rollout_logprobs=rollout_logprobs,
                ref_logprobs=ref_logprobs,
                entropies=entropies,
                advantages=advantages,
                mask=mask,
            ),
            config,
            denominator=denominator,
            entropy_coef=config.entropy_coef,
            kl_coef=config.kl_coef,
        ).loss
        if isinstance(config, PpoConfig):
            num_tokens = int(mask.sum())
            loss = loss + config.value_coef * value_loss(
                values, old_values, targets, mask, config.value_clip, num_tokens
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def compute_success_rate(policy: TabularPolicy) -> float:
    """Return the mean probability of a correct completion."""
    with torch.no_grad():
        probabilities = (policy.logits + policy.completion_mask).softmax(-1)
    success_probabilities = [
        probabilities[4 * turn + number, 8 + number] for turn in range(2) for number in range(4)
    ]
    return float(torch.stack(success_probabilities).mean())


def learn(config: AlgorithmConfig, *, is_shuffled: bool = False) -> float:
    """Train briefly; return the probability of a correct completion, which starts at 1/4."""
    generator = torch.Generator().manual_seed(0)
    policy = TabularPolicy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        groups = play_groups(policy, generator)
        if is_shuffled:
            groups = shuffle_rewards(groups, random.Random(step))
        train_step(policy, optimizer, make_batch(groups, config), config)
    return compute_success_rate(policy)


ALGORITHMS = {
    "default": GrpoConfig(),
    "grpo": GrpoConfig(scale="group", aggregation="sequence_mean", kl_coef=0.01),
    "dr_grpo": GrpoConfig(aggregation="constant"),
    "rloo": GrpoConfig(baseline="leave_one_out", correction=IcePop()),
    "dapo": GrpoConfig(scale="group", correction=NoCorrection()),
    "gspo": GrpoConfig(
        loss=GspoLoss(clip_low=0.1, clip_high=0.1),
        aggregation="sequence_mean",
        correction=SequenceTis(),
    ),
    "cispo": GrpoConfig(loss=CispoLoss(), correction=SequenceMask(), scale="batch"),
    "turn_credit": GrpoConfig(credit="turn", entropy_coef=0.001),
    "two_policies": GrpoConfig(old_logprobs="rollout", correction=NoCorrection()),
    "no_baseline": GrpoConfig(baseline="none", zero_variance_groups="keep"),
    "reinforce": ReinforceConfig(),
    "reinforce_baseline": ReinforceConfig(baseline="mean"),
    "reinforce_kl": ReinforceConfig(**REWARD_KL_SETTINGS),
    "ppo": PpoConfig(),
    "ppo_kl": PpoConfig(gamma=0.9, lam=0.9, **REWARD_KL_SETTINGS),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_the_rewarded_completion(name: str) -> None:
    assert learn(ALGORITHMS[name]) > 0.9


@pytest.mark.parametrize("name", ["default", "turn_credit", "reinforce", "ppo"])
def test_no_algorithm_learns_from_shuffled_rewards(name: str) -> None:
    assert learn(ALGORITHMS[name], is_shuffled=True) < 0.45
