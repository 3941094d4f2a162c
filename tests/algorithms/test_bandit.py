"""Every algorithm learns a game of two guesses, and no algorithm learns from random rewards."""

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

pytestmark = pytest.mark.slow

NUM_QUESTIONS = 4
NUM_TURNS = 2
VOCABULARY = 16
"""Tokens 0..3 are questions of the first turn, 4..7 of the second; 8..11 are answers."""
GROUP_SIZE = 8
NUM_GROUPS = 8
NUM_STEPS = 20

IN_REWARD = {"kl_placement": "reward", "kl_coef": 0.01, "kl_estimator": "k1"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, which is faster for tensors this small."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Tables(torch.nn.Module):
    """A policy and a critic that depend only on the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))
        self.values = torch.nn.Parameter(torch.zeros(VOCABULARY))
        mask = torch.full((VOCABULARY,), -1e9)
        mask[8:12] = 0.0
        self.register_buffer("answers_only", mask)

    def evaluate(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs, entropies and values [N, T] of each token, given the previous token."""
        previous = torch.cat([token_ids[:, :1], token_ids[:, :-1]], dim=1)
        logits = self.logits[previous] + self.answers_only
        return (
            token_logprobs(logits, token_ids),
            entropy(logits.log_softmax(-1)),
            self.values[previous],
        )


@torch.no_grad()
def play_groups(policy: Tables, generator: torch.Generator) -> list[RolloutGroup]:
    """Play groups with the same question in both turns; a right answer has reward 1."""
    shape = (NUM_GROUPS, 1, NUM_TURNS)
    questions = torch.randint(NUM_QUESTIONS, shape, generator=generator).expand(-1, GROUP_SIZE, -1)
    prompts = questions + torch.tensor([0, 4])
    logprobs = (policy.logits[prompts] + policy.answers_only).log_softmax(-1)
    flat = logprobs.exp().view(-1, VOCABULARY)
    answers = torch.multinomial(flat, 1, generator=generator).view(prompts.shape)
    chosen = logprobs.gather(-1, answers[..., None])[..., 0]
    rewards = (answers == questions + 8).float()
    return [
        RolloutGroup(
            index,
            "guess",
            tuple(
                _rollout(prompts[index, i], answers[index, i], chosen[index, i], rewards[index, i])
                for i in range(GROUP_SIZE)
            ),
        )
        for index in range(NUM_GROUPS)
    ]


def _rollout(prompts: Tensor, answers: Tensor, logprobs: Tensor, rewards: Tensor) -> Rollout:
    turns = [
        Turn([prompt], SampledCompletion([answer], [logprob], 0, has_end_token=True), reward)
        for prompt, answer, logprob, reward in zip(
            prompts.tolist(), answers.tolist(), logprobs.tolist(), rewards.tolist(), strict=True
        )
    ]
    total = float(rewards.sum())
    return Rollout("guess", 0, (join_turns(turns),), total, total, (), RolloutStatus.TERMINATED, 0)


def rows(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return token ids, mask, rollout log-probs, advantages and rewards, [N, T] each."""
    sequence_ids = batch.sequence_of_sample.tolist()
    lists = (
        [batch.sequences[i] for i in sequence_ids],
        [batch.loss_masks[i] for i in sequence_ids],
        batch.rollout_logprobs,
        batch.advantages,
        batch.rewards,
    )
    ids, mask, rollout, advantages, rewards = (
        pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True) for rows in lists
    )
    return ids, mask, rollout, advantages, rewards


def train_step(
    policy: Tables, optimizer: torch.optim.Optimizer, batch: Batch, config: AlgorithmConfig
) -> None:
    """Take two updates on the same rows, so that the policy has changed before the second."""
    ids, mask, rollout, advantages, rewards = rows(batch)
    with torch.no_grad():
        old, _, old_values = policy.evaluate(ids)
        ref = torch.full_like(old, 1 / 4).log()
        if config.kl_placement == "reward":
            penalty = kl_penalty(old, ref, mask, config.kl_coef)
            rewards = rewards + penalty
            advantages = advantages + discounted_returns(penalty, mask, 1.0)
        targets = torch.zeros_like(old)
        if isinstance(config, PpoConfig):
            terminated, zeros = torch.from_numpy(batch.terminated), torch.zeros(len(ids))
            advantages = gae(rewards, old_values, mask, terminated, zeros, config.gamma, config.lam)
            targets = critic_targets(advantages, old_values, mask)
        if isinstance(config, PpoConfig) or config.kl_placement == "reward":
            advantages = whiten(advantages, mask, moments(advantages, mask))
    denominator = loss_denominator(mask.sum(-1), config.aggregation, max_tokens=4)
    for _ in range(2):
        new, entropies, values = policy.evaluate(ids)
        loss = policy_gradient_loss(
            LossInputs(
                logprobs=new,
                old_logprobs=rollout if config.old_logprobs == "rollout" else old,
                rollout_logprobs=rollout,
                ref_logprobs=ref,
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
            tokens = int(mask.sum())
            loss = loss + config.value_coef * value_loss(
                values, old_values, targets, mask, config.value_clip, tokens
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def share_right(policy: Tables) -> float:
    """Return the mean probability of a right answer."""
    with torch.no_grad():
        probabilities = (policy.logits + policy.answers_only).softmax(-1)
    right = [probabilities[4 * turn + q, 8 + q] for turn in range(2) for q in range(4)]
    return float(torch.stack(right).mean())


def learn(config: AlgorithmConfig, *, shuffled: bool = False) -> float:
    """Return the probability of right answers after a short training, from 1/4."""
    generator = torch.Generator().manual_seed(0)
    policy = Tables()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        groups = play_groups(policy, generator)
        if shuffled:
            groups = shuffle_rewards(groups, random.Random(step))
        train_step(policy, optimizer, make_batch(groups, config), config)
    return share_right(policy)


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
    "reinforce_kl": ReinforceConfig(**IN_REWARD),
    "ppo": PpoConfig(),
    "ppo_kl": PpoConfig(gamma=0.9, lam=0.9, **IN_REWARD),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_to_answer(name: str) -> None:
    assert learn(ALGORITHMS[name]) > 0.9


@pytest.mark.parametrize("name", ["default", "turn_credit", "reinforce", "ppo"])
def test_no_algorithm_learns_from_shuffled_rewards(name: str) -> None:
    assert learn(ALGORITHMS[name], shuffled=True) < 0.45
