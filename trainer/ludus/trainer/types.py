"""The types of the training plane, one per stage.

    Completion   what the generator sampled for one prompt
        |        + the prompt that led to it
        v
    Turn         one decision: prompt tokens added, tokens sampled
        |        joined by the episode, scored by the environment
        v
    Rollout      one episode as one token sequence, with a mask and log-probs
        |        G of them from the same seed
        v
    RolloutGroup
        |        rewards -> advantages
        v
    TrainingSample
        |        B of them
        v
    Batch        what one training step consumes

Legend for shapes: T = tokens of a sequence, G = episodes of a group, N = samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion."""

    temperature: float
    """0 takes the likeliest token."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What the generator sampled for one prompt; the end token is part of it."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens, at the sampling temperature."""
    policy_version: int
    """Version of the weights that sampled the first token."""
    stopped: bool
    """True when it ended with an end token, False when it ran out of tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision of an episode."""

    prompt_ids: list[int]
    """Tokens added since the turn before: never sampled, never trained on."""
    completion: Completion


class RolloutStatus(StrEnum):
    """How an episode ended."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    """A limit outside the rules: turns, tokens, or the environment's own."""
    INVALID_ACTION = "invalid_action"
    """The text was no action."""
    LOST = "lost"
    """Infrastructure failed: void, not a loss."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode as the policy saw it.

    Example, two turns (prompt p, sampled s): token_ids = p p p s s p p s s,
    loss_mask = F F F T T F F T T.
    """

    seed: int
    token_ids: list[int]
    """[T]"""
    loss_mask: list[bool]
    """[T] True = sampled by the policy."""
    logprobs: list[float]
    """[T] of the sampler, 0 where not sampled."""
    reward: float | None
    """Return of the episode; None = it could not be scored."""
    status: RolloutStatus
    num_turns: int
    policy_version: int
    """Oldest version of the weights that sampled any of its tokens."""


def join_turns(turns: Sequence[Turn]) -> tuple[list[int], list[bool], list[float]]:
    """Token ids, loss mask and sampler log-probs of an episode's turns, each [T]."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    for turn in turns:
        num_prompt, num_sampled = len(turn.prompt_ids), len(turn.completion.token_ids)
        token_ids += turn.prompt_ids
        token_ids += turn.completion.token_ids
        loss_mask += [False] * num_prompt + [True] * num_sampled
        logprobs += [0.0] * num_prompt
        logprobs += turn.completion.logprobs
    return token_ids, loss_mask, logprobs


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group to be played."""

    index: int
    """Counts the groups of a run; seeds follow from it."""
    seeds: tuple[int, ...]
    """[G] one per episode; all equal in a same-seed group."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The episodes of one group."""

    index: int
    rollouts: tuple[Rollout, ...]
    """[G]"""

    @property
    def rewards(self) -> list[float | None]:
        """[G] rewards; None = could not be scored."""
        return [rollout.reward for rollout in self.rollouts]

    @property
    def num_lost(self) -> int:
        """Episodes that infrastructure voided."""
        return sum(rollout.status is RolloutStatus.LOST for rollout in self.rollouts)

    @property
    def policy_version(self) -> int:
        """Oldest version of the weights that sampled any of its tokens."""
        return min(r.policy_version for r in self.rollouts if r.reward is not None)

    @property
    def is_dead(self) -> bool:
        """True when the rewards teach nothing: fewer than two scored, or all exactly equal."""
        scored = {reward for reward in self.rewards if reward is not None}
        return len(scored) < 2


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One episode, ready for the loss."""

    token_ids: list[int]
    """[T]"""
    loss_mask: list[bool]
    """[T]"""
    rollout_logprobs: list[float]
    """[T]"""
    advantage: float


@dataclass(frozen=True, slots=True)
class Batch:
    """What one training step consumes.

    Samples of the same token sequence share one row of `sequences`: the model computes it
    once, the loss counts each sample.
    """

    sequences: list[np.ndarray]
    """[U] int64 arrays [T], no two equal."""
    sequence_of_sample: np.ndarray
    """int64 [N] row of `sequences` for each sample."""
    loss_masks: list[np.ndarray]
    """[U] bool arrays [T]; equal tokens have equal masks, since masks follow from the turns."""
    rollout_logprobs: list[np.ndarray]
    """[N] float32 arrays [T]."""
    advantages: np.ndarray
    """float32 [N]"""

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.advantages)

    @property
    def num_loss_tokens(self) -> int:
        """Sampled tokens over all samples."""
        per_sequence = np.array([int(mask.sum()) for mask in self.loss_masks])
        return int(per_sequence[self.sequence_of_sample].sum())


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What the optimizer and the loss use in one training step."""

    learning_rate: float
    entropy: float
    """Weight of the entropy bonus."""
    kl: float
    """Weight of the divergence from the reference model."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed question whose answer's log-probs tell which weights a generator holds."""

    prompt_ids: list[int]
    completion_ids: list[int]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a published version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    checksum: str
    """BLAKE2b of the raw bytes."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What a version of the weights consists of, and how to tell that it arrived."""

    version: int
    tensors: tuple[TensorEntry, ...]
    content_hash: str
    """Over all names, shapes and checksums."""
    probe: Probe
    probe_logprobs: tuple[float, ...]
    """The learner's own answer to the probe under these weights."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors)
