"""The types of the training plane, one per stage.

    SampledCompletion   sampled for one prompt
        |        + the prompt
        v
    Turn         one decision: new prompt tokens and sampled tokens
        |        joined by the episode, rewarded by the environment
        v
    Rollout      one episode as a token sequence with mask and log-probs
        |        G rollouts from the same seed
        v
    RolloutGroup
        |        rewards -> advantages
        v
    TrainingSample
        |        B groups of samples
        v
    Batch        the input of one training step

Rollouts and batches contain arrays, so a token takes nine bytes in transfer, and a single call
sends thousands of tokens. A token of a completion that was restricted to the legal answers also
takes four bytes for each token that was allowed at its position.

Legend for shapes: T = tokens of a sequence, G = episodes of a group, N = samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Transcript
from ludus.trainer.core.array_schemas import ROWS_SCHEMA, make_list_schema
from ludus.trainer.core.checksums import hash_file
from ludus.trainer.core.ragged import RaggedArray, join_rows


class _FastPickle:
    """Base class of dataclasses that pickle as a call with their values.

    Pickling takes half the time of a plain dataclass. Workers send thousands of objects per second.
    """

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__match_args__])


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one completion."""

    temperature: float
    """Temperature; 0 selects the most likely token."""
    max_tokens: int
    top_p: float = 1.0
    """Probability mass of the most likely tokens to sample from."""
    top_k: int = 0
    """Number of the most likely tokens to sample from; 0 means all."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to the most likely token."""
    repetition_penalty: float = 1.0
    """Factor for tokens that already occurred in the prompt or the completion. Positive logits are
    divided by it, negative logits are multiplied by it, and 1 has no effect."""

    def __post_init__(self) -> None:
        """Check all bounds, because one invalid request makes an engine fail its whole batch.

        Raises:
            ConfigError: a field is not a number within its bounds.
        """
        for name, (number_type, min_value, max_value, description) in _SAMPLING_BOUNDS.items():
            value = getattr(self, name)
            is_number = isinstance(value, number_type) and not isinstance(value, bool)
            is_greedy = name == "temperature" and value == 0
            if not is_number or not (is_greedy or min_value <= value <= max_value):
                raise ConfigError(f"{name} must be {description}, got {value!r:.60}")

    @property
    def changes_only_temperature(self) -> bool:
        """True if only the temperature changes the distribution."""
        return not self.excludes_tokens and self.repetition_penalty == 1

    @property
    def excludes_tokens(self) -> bool:
        """True if some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


_MIN_POSITIVE, _MAX_POSITIVE = 1e-6, 1e6
"""Bounds of positive parameters. Beyond them an engine computes 0 or infinity."""
_POSITIVE = f"a number from {_MIN_POSITIVE:g} to {_MAX_POSITIVE:g}"
_SAMPLING_BOUNDS: Mapping[str, tuple[type, float, float, str]] = {
    "temperature": (Real, _MIN_POSITIVE, _MAX_POSITIVE, f"0, or {_POSITIVE}"),
    "max_tokens": (Integral, 1, math.inf, "a whole number of 1 or more"),
    "top_p": (Real, _MIN_POSITIVE, 1.0, f"a number from {_MIN_POSITIVE:g} to 1"),
    "top_k": (Integral, 0, math.inf, "a whole number of 0 or more"),
    "min_p": (Real, 0.0, 1.0, "a number from 0 to 1"),
    "repetition_penalty": (Real, _MIN_POSITIVE, _MAX_POSITIVE, _POSITIVE),
}


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """The tokens sampled for one prompt, including the end token."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probs of the sampled tokens, under the distribution that they were sampled from."""
    policy_version: int
    """Weights version that sampled the first token."""
    has_end_token: bool
    """False if the completion reached its maximum number of tokens."""
    allowed_ids: RaggedArray | None = None
    """int32 tokens that could be sampled at each position; None if all tokens could."""


@dataclass(slots=True, eq=False)
class Turn:
    """One completion of an episode, and its effect in the environment."""

    prompt_ids: list[int]
    """Tokens between the parent's completion and this one. They are not trained on."""
    completion: SampledCompletion
    reward: float = 0.0
    token_rewards: tuple[float, ...] = ()
    """Reward of each sampled token, with sum `reward`; empty if only the turn has a reward."""
    messages: Sequence[Message] = ()
    """New messages that the policy saw before this turn."""
    text: str = ""
    """Text of the completion."""
    action: Any = None
    """Action that the completion caused; None if it caused none."""
    parent: Turn | None = None
    """Previous turn of the sequence; None for its first turn."""
    is_cut: bool = False
    """True if the completion reached its maximum number of tokens."""

    @property
    def lineage(self) -> list[Turn]:
        """Turns from the first turn of the sequence to this one."""
        lineage = [self]
        while (parent := lineage[-1].parent) is not None:
            lineage.append(parent)
        return lineage[::-1]


class RolloutStatus(StrEnum):
    """The status of a finished episode."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    """A limit cut the episode off: turns, tokens, or a limit of the environment."""
    INVALID_ACTION = "invalid_action"
    """A completion was not a valid action."""
    LOST = "lost"
    """The infrastructure ended the episode, so it is void."""
    FAILED = "failed"
    """Code of the environment, the engine or the run raised an error, so the episode is void."""

    @property
    def is_void(self) -> bool:
        """True if the episode must not be trained on."""
        return self in (RolloutStatus.LOST, RolloutStatus.FAILED)


@dataclass(frozen=True, slots=True)
class TurnSpan(_FastPickle):
    """The positions of a turn's sampled tokens in its sequence, and their reward."""

    start: int
    """Position of the first sampled token."""
    end: int
    """Position after the last sampled token."""
    reward: float
    token_rewards: tuple[float, ...] = ()
    """Reward of each sampled token; if empty, the last token gets the whole reward."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """Turns as one sequence of tokens, as the policy sees them.

    Example with two turns (p = prompt token, s = sampled token): token_ids = p p p s s p p s s,
    loss_mask = F F F T T F F T T.
    """

    token_ids: Annotated[np.ndarray, make_list_schema(np.int32)]
    """int32 [T]"""
    logprobs: Annotated[np.ndarray, make_list_schema(np.float32)]
    """float32 [T] log-probs at sampling time; 0 for tokens that were not sampled."""
    turns: tuple[TurnSpan, ...]
    allowed_ids: Annotated[RaggedArray | None, ROWS_SCHEMA] = None
    """int32 tokens that could be sampled, a row for each sampled token; None if all tokens could
    always be sampled."""

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [T] True for tokens that the policy sampled."""
        mask = np.zeros(len(self.token_ids), dtype=np.bool_)
        for turn in self.turns:
            mask[turn.start : turn.end] = True
        return mask

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSequence) and self.__reduce__() == other.__reduce__()

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray sends each array as a separate buffer, which is expensive for short arrays.
        buffers = self.token_ids.tobytes(), self.logprobs.tobytes(), self.turns
        if self.allowed_ids is not None:
            return _unpack_sequence, (*buffers, *self.allowed_ids.to_bytes())
        return _unpack_sequence, buffers


def _unpack_sequence(
    token_ids: bytes,
    logprobs: bytes,
    turns: tuple[TurnSpan, ...],
    allowed_values: bytes = b"",
    allowed_ends: bytes = b"",
) -> TokenSequence:
    arrays = np.frombuffer(token_ids, np.int32), np.frombuffer(logprobs, np.float32)
    if not allowed_ends:
        return TokenSequence(*arrays, turns)
    allowed_ids = RaggedArray(
        np.frombuffer(allowed_values, np.int32), np.frombuffer(allowed_ends, np.int64)
    )
    return TokenSequence(*arrays, turns, allowed_ids)


@dataclass(frozen=True, slots=True)
class ScoredTerm(_FastPickle):
    """One term of an episode's reward, before it is weighted."""

    name: str
    value: float | None
    """Value of the term; None if it could not be computed."""


@dataclass(frozen=True, slots=True)
class Rollout(_FastPickle):
    """One episode as token sequences with a reward."""

    environment: str
    """Name of the environment in the run."""
    seed: int
    sequences: tuple[TokenSequence, ...]
    """Token sequences of the episode. There are several if the chat template removes earlier
    reasoning, or if an agent's history branches. Each turn belongs to exactly one sequence."""
    reward: float | None
    """Weighted sum of the terms, used for training; None if it could not be computed."""
    episode_return: float | None
    """Sum of the environment's rewards; None if unknown."""
    terms: tuple[ScoredTerm, ...]
    status: RolloutStatus
    policy_version: int
    """Oldest weights version that sampled any of the tokens."""
    failure: str = ""
    """Reason why the episode is void or a reward term is unknown; empty if nothing failed."""
    num_tool_calls: int = 0
    num_tool_calls_failed: int = 0
    """Number of tool calls that returned an error, or could not be parsed or made."""
    success: bool | None = None
    """Success as the environment reports it; None if it reports nothing."""
    num_branches: int = 0
    """Number of sequences that branch off another, because an agent changed its history."""
    has_agent_failed: bool = False
    """True if the episode is void because its agent failed or did not finish in time."""
    is_masked: bool = False
    """True if the episode counts in baselines, but is not trained on."""
    length_penalty: float | None = None
    """Penalty for the length, at most 0, which is part of the reward; None if there is none."""
    limit: Literal["", "turns", "tokens"] = ""
    """Limit of the run that ended the episode; empty if something else ended it."""

    @property
    def turns(self) -> tuple[TurnSpan, ...]:
        """Turns of all sequences, in order."""
        return tuple(turn for sequence in self.sequences for turn in sequence.turns)

    @property
    def num_tokens_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(turn.end - turn.start for turn in self.turns)


def join_tokens(turns: Sequence[Turn]) -> list[int]:
    """Return all tokens of consecutive turns of a sequence."""
    token_ids: list[int] = []
    for turn in turns:
        token_ids += turn.prompt_ids
        token_ids += turn.completion.token_ids
    return token_ids


def join_turns(
    turns: Sequence[Turn], prefix_ids: Sequence[int] = (), suffix_ids: Sequence[int] = ()
) -> TokenSequence:
    """Return turns as one sequence, after `prefix_ids` and before `suffix_ids`.

    The prefix and the suffix are not trained on. The suffix is the last observation of a truncated
    episode, for which the critic predicts the return.
    """
    token_ids = [*prefix_ids, *join_tokens(turns), *suffix_ids]
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    spans: list[TurnSpan] = []
    end = len(prefix_ids)
    for turn in turns:
        start = end + len(turn.prompt_ids)
        end = start + len(turn.completion.token_ids)
        logprobs[start:end] = turn.completion.logprobs
        spans.append(TurnSpan(start, end, turn.reward, turn.token_rewards))
    allowed_ids = join_rows([turn.completion.allowed_ids for turn in turns])
    return TokenSequence(np.array(token_ids, dtype=np.int32), logprobs, tuple(spans), allowed_ids)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The specification of a group to play."""

    index: int
    """Index of the group in the run. The seeds are derived from it."""
    environment: str
    seeds: tuple[int, ...]
    """[G] seed of each episode, usually the same for all."""
    num_replaced: int = 0
    """Number of consecutive zero-variance or void groups that this group replaces."""
    num_lost: int = 0
    """Number of consecutive lost groups on the same task of a data set."""
    is_final: bool = False
    """True if the group is trained on even if it has zero variance, because the groups of the step
    were replaced too often."""


@dataclass(frozen=True, slots=True)
class RolloutGroup(_FastPickle):
    """The episodes of one group."""

    index: int
    environment: str
    rollouts: tuple[Rollout, ...]
    """[G]"""
    transcripts: tuple[Transcript, ...] = ()
    """Transcripts of the first episodes; empty for most groups."""

    @property
    def rewards(self) -> list[float | None]:
        """[G] rewards; None for episodes without a reward."""
        return [rollout.reward for rollout in self.rollouts]

    @property
    def policy_version(self) -> int:
        """Oldest weights version that sampled any of the tokens."""
        return min(
            rollout.policy_version for rollout in self.rollouts if rollout.reward is not None
        )


def make_lost_group(spec: GroupSpec, reason: str = "its rollout worker died") -> RolloutGroup:
    """Return a group whose episodes are all lost."""
    status, name = RolloutStatus.LOST, spec.environment
    rollouts = [Rollout(name, seed, (), None, None, (), status, 0, reason) for seed in spec.seeds]
    return RolloutGroup(spec.index, name, tuple(rollouts))


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence of an episode, ready for the loss."""

    token_ids: Sequence[int] | np.ndarray
    """[T]"""
    loss_mask: Sequence[bool] | np.ndarray
    """[T]"""
    rollout_logprobs: Sequence[float] | np.ndarray
    """[T]"""
    advantages: Sequence[float] | np.ndarray
    """[T] 0 for tokens that were not sampled; all 0 if the learner uses a critic instead."""
    rewards: Sequence[float] | np.ndarray
    """[T] reward of each token. A reward of a whole turn is at the turn's last token."""
    terminated: bool
    """True if the episode reached its natural end; False if more reward could have followed."""
    adds_next_return: bool = False
    """True if the return includes that of the next sample, a later sequence of the episode."""
    allowed_ids: RaggedArray | None = None
    """As in TokenSequence."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one training step.

    Samples with the same tokens share one row of `sequences`. The model evaluates the row once, and
    the loss counts it for each sample.
    """

    sequences: RaggedArray
    """[U] int64 arrays [T], all distinct."""
    sequence_of_sample: np.ndarray
    """int64 [N] row of `sequences` for each sample."""
    loss_masks: RaggedArray
    """[U] bool arrays [T], True for sampled tokens."""
    rollout_logprobs: RaggedArray
    """[N] float32 arrays [T]."""
    advantages: RaggedArray
    """[N] float32 arrays [T], 0 for tokens that were not sampled."""
    rewards: RaggedArray
    """[N] float32 arrays [T], as in TrainingSample."""
    terminated: np.ndarray
    """bool [N]"""
    adds_next_return: np.ndarray
    """bool [N], as in TrainingSample."""
    allowed_ids: RaggedArray | None = None
    """int32 tokens that could be sampled, a row for each sampled token of all U sequences; None if
    all tokens could always be sampled."""

    @property
    def num_samples(self) -> int:
        return len(self.sequence_of_sample)

    @property
    def num_sampled_tokens(self) -> np.ndarray:
        """int64 [U] number of sampled tokens of each sequence."""
        return np.array([np.count_nonzero(mask) for mask in self.loss_masks], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients of the optimizer and the loss in one training step."""

    learning_rate: float
    entropy: float
    kl: float


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A prompt and a completion whose log-probs are requested."""

    prompt_ids: list[int]
    completion_ids: list[int]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a published weights version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    checksum: str
    """BLAKE3 hash of the raw bytes."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """The tensors of a weights version, and the canary that proves that an engine uses them."""

    version: int
    tensors: tuple[TensorEntry, ...]
    content_hash: str
    """Hash of the names, shapes and checksums of all tensors."""
    canary: tuple[ScoringRequest, ...]
    canary_logprobs: tuple[tuple[float, ...], ...]
    """Log-probs of each canary completion, as the learner computed them with these weights."""
    rounding_error: float = 0.0
    """Largest difference of these log-probs by rounding alone, in nats, as the learner measured."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(entry.num_bytes for entry in self.tensors)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file of a checkpoint, as reported by the rank that wrote it."""

    path: Path
    num_bytes: int
    checksum: str
    """BLAKE3 hash of the content, in hexadecimal digits."""

    @classmethod
    def from_path(cls, path: Path) -> SavedFile:
        """Build the record of an existing file."""
        return cls(path, path.stat().st_size, hash_file(path))
