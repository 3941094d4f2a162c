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

Rollouts and batches hold arrays: a token takes nine bytes on its way, and thousands of them one
call.

Legend for shapes: T = tokens of a sequence, G = episodes of a group, N = samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike
from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from ludus.proto.errors import ConfigError
from ludus.proto.runs import Transcript
from ludus.trainer.core.ragged import Ragged


def _listed(dtype: DTypeLike) -> GetPydanticSchema:
    """The schema of an array that is a list of numbers in files."""
    return GetPydanticSchema(
        lambda *_: core_schema.no_info_plain_validator_function(
            lambda values: np.asarray(values, dtype=dtype),
            serialization=core_schema.plain_serializer_function_ser_schema(np.ndarray.tolist),
        )
    )


class _Travels:
    """Pickled as a call with its values: half the time of what a dataclass does by itself.

    Thousands of these travel per second, from worker to buffer.
    """

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__match_args__])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion."""

    temperature: float
    """0 takes the likeliest token."""
    max_tokens: int
    top_p: float = 1.0
    """Samples from the likeliest tokens that hold this probability."""
    top_k: int = 0
    """Samples from so many of the likeliest tokens; 0 from all."""
    min_p: float = 0.0
    """Samples from tokens of at least this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the prompt or the answer has already, and
    multiplies the negative ones; 1 leaves them alone."""

    def __post_init__(self) -> None:
        """Refuse what has no distribution: in an engine it would fail all requests beside it.

        Raises:
            ConfigError: a field is not a number within its bounds.
        """
        for name, (kind, least, most, said) in _BOUNDS_OF_SAMPLING.items():
            value = getattr(self, name)
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            is_greedy = name == "temperature" and value == 0
            if not is_number or not (is_greedy or least <= value <= most):
                raise ConfigError(f"{name} = {value!r:.60} expected {said}")

    @property
    def is_plain(self) -> bool:
        """True where nothing but the temperature stands between logits and probabilities."""
        return not self.cuts_off and self.repetition_penalty == 1

    @property
    def cuts_off(self) -> bool:
        """True where some tokens can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


_LEAST, _MOST = 1e-6, 1e6
"""What is closer to 0 is 0 in the arithmetic of an engine, or divides by it."""
_BOUNDS_OF_SAMPLING: Mapping[str, tuple[type, float, float, str]] = {
    "temperature": (Real, _LEAST, _MOST, f"0, or a number from {_LEAST:g} to {_MOST:g}"),
    "max_tokens": (Integral, 1, math.inf, "a whole number of 1 or more"),
    "top_p": (Real, _LEAST, 1.0, f"a number from {_LEAST:g} to 1"),
    "top_k": (Integral, 0, math.inf, "a whole number of 0 or more"),
    "min_p": (Real, 0.0, 1.0, "a number from 0 to 1"),
    "repetition_penalty": (Real, _LEAST, _MOST, f"a number from {_LEAST:g} to {_MOST:g}"),
}


@dataclass(frozen=True, slots=True)
class Completion:
    """What the generator sampled for one prompt; the end token is part of it."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens, under the distribution that they were drawn from."""
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
    reward: float = 0.0
    """What the environment paid for it."""
    token_rewards: tuple[float, ...] = ()
    """What it paid for each sampled token, where it pays for tokens; the reward is their sum."""


class RolloutStatus(StrEnum):
    """How an episode ended."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    """A limit outside the rules: turns, tokens, or the environment's own."""
    INVALID_ACTION = "invalid_action"
    """The text was no action."""
    LOST = "lost"
    """Infrastructure failed: void, not a loss."""
    FAILED = "failed"
    """Code failed, the environment's, the engine's or the run's own: void, too."""

    @property
    def is_void(self) -> bool:
        """True when nothing may be learned from the episode."""
        return self in (RolloutStatus.LOST, RolloutStatus.FAILED)


@dataclass(frozen=True, slots=True)
class TurnSpan(_Travels):
    """Where a turn's sampled tokens stand in its sequence, and what they earned."""

    start: int
    """Position of the first."""
    end: int
    """One past the last."""
    reward: float
    """What the environment paid for the turn."""
    token_rewards: tuple[float, ...] = ()
    """What it paid for each token, where it pays for tokens; else all stands on the last."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """Turns as the policy saw them: one growing text, token by token.

    Example, two turns (prompt p, sampled s): token_ids = p p p s s p p s s,
    loss_mask = F F F T T F F T T.
    """

    token_ids: Annotated[np.ndarray, _listed(np.int32)]
    """int32 [T]"""
    logprobs: Annotated[np.ndarray, _listed(np.float32)]
    """float32 [T] of the sampler, 0 where not sampled."""
    turns: tuple[TurnSpan, ...]

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [T], True = sampled by the policy."""
        mask = np.zeros(len(self.token_ids), dtype=np.bool_)
        for turn in self.turns:
            mask[turn.start : turn.end] = True
        return mask

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSequence) and self.__reduce__() == other.__reduce__()

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray sends every array as a buffer of its own, which costs more than a short one holds.
        return _unpacked, (self.token_ids.tobytes(), self.logprobs.tobytes(), self.turns)


def _unpacked(token_ids: bytes, logprobs: bytes, turns: tuple[TurnSpan, ...]) -> TokenSequence:
    return TokenSequence(
        np.frombuffer(token_ids, np.int32), np.frombuffer(logprobs, np.float32), turns
    )


@dataclass(frozen=True, slots=True)
class ScoredTerm(_Travels):
    """One term of an episode's reward, before its weight."""

    name: str
    value: float | None
    """None = it could not be scored."""


@dataclass(frozen=True, slots=True)
class Rollout(_Travels):
    """One episode as the policy saw it."""

    environment: str
    """Its name in the run."""
    seed: int
    sequences: tuple[TokenSequence, ...]
    """One; more where the chat template takes earlier thoughts out again, or an agent's history
    branches: one for each end. Each sampled token is in the turns of one of them."""
    reward: float | None
    """What is learned from: the weighted sum of the terms; None = it could not be scored."""
    episode_return: float | None
    """What the environment paid in all; None when that is unknown."""
    terms: tuple[ScoredTerm, ...]
    status: RolloutStatus
    policy_version: int
    """Oldest version of the weights that sampled any of its tokens."""
    failure: str = ""
    """What made it void, or a term of its reward unknown; empty where nothing failed."""
    num_tool_calls: int = 0
    """The failed ones included."""
    num_tool_calls_failed: int = 0
    """That returned an error, or that could not be read or made."""
    success: bool | None = None
    """What the environment said of it, by which wins are counted; None where it said nothing."""
    num_branches: int = 0
    """Sequences that begin where another one went on: what agents do with their history."""
    agent_died: bool = False
    """True where it is void because its agent failed, or did not end in time."""

    @property
    def turns(self) -> tuple[TurnSpan, ...]:
        """The turns of all sequences, in order."""
        return tuple(turn for sequence in self.sequences for turn in sequence.turns)

    @property
    def num_tokens_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(turn.end - turn.start for turn in self.turns)


def join_turns(turns: Sequence[Turn], rest_ids: Sequence[int] = ()) -> TokenSequence:
    """The turns as one sequence, with `rest_ids` (never sampled) after the last.

    The rest is what a truncated episode showed last: the value of that state stands there.
    """
    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[TurnSpan] = []
    for turn in turns:
        token_ids += turn.prompt_ids
        logprobs += [0.0] * len(turn.prompt_ids)
        start = len(token_ids)
        token_ids += turn.completion.token_ids
        logprobs += turn.completion.logprobs
        spans.append(TurnSpan(start, len(token_ids), turn.reward, turn.token_rewards))
    token_ids += rest_ids
    logprobs += [0.0] * len(rest_ids)
    return TokenSequence(
        np.array(token_ids, dtype=np.int32), np.array(logprobs, dtype=np.float32), tuple(spans)
    )


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group to be played."""

    index: int
    """Counts the groups of a run; seeds follow from it."""
    environment: str
    """Its name in the run."""
    seeds: tuple[int, ...]
    """[G] one per episode; all equal in a same-seed group."""
    num_replaced: int = 0
    """Groups in a row that taught nothing, and whose place this one has."""
    num_lost: int = 0
    """Groups in a row that were lost on the same task of a data set."""


@dataclass(frozen=True, slots=True)
class RolloutGroup(_Travels):
    """The episodes of one group."""

    index: int
    environment: str
    rollouts: tuple[Rollout, ...]
    """[G]"""
    transcripts: tuple[Transcript, ...] = ()
    """What was said in some of them, for people to read."""

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
    def has_zero_variance(self) -> bool:
        """True when the rewards teach nothing: fewer than two scored, or all exactly equal."""
        scored = {reward for reward in self.rewards if reward is not None}
        return len(scored) < 2


def lost_group(spec: GroupSpec, reason: str = "its rollout worker ended") -> RolloutGroup:
    """The group of which nothing came back."""
    lost, name = RolloutStatus.LOST, spec.environment
    rollouts = [Rollout(name, seed, (), None, None, (), lost, 0, reason) for seed in spec.seeds]
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
    """[T] 0 where not sampled; all 0 where the learner's critic finds them."""
    rewards: Sequence[float] | np.ndarray
    """[T] 0 but on the last token of each turn, unless each token has its own."""
    terminated: bool
    """False when the episode was cut off: more reward could have followed."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one training step consumes.

    Samples of the same token sequence share one row of `sequences`: the model computes it
    once, the loss counts each sample.
    """

    sequences: Ragged
    """[U] int64 arrays [T], no two equal."""
    sequence_of_sample: np.ndarray
    """int64 [N] row of `sequences` for each sample."""
    loss_masks: Ragged
    """[U] bool arrays [T]; equal tokens have equal masks, since masks follow from the turns."""
    rollout_logprobs: Ragged
    """[N] float32 arrays [T]."""
    advantages: Ragged
    """[N] float32 arrays [T], 0 where not sampled."""
    rewards: Ragged
    """[N] float32 arrays [T], 0 but on the last token of each turn, unless each has its own."""
    terminated: np.ndarray
    """bool [N]"""

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.sequence_of_sample)

    @property
    def num_loss_tokens(self) -> int:
        """Sampled tokens over all samples."""
        return int(self.num_sampled[self.sequence_of_sample].sum())

    @property
    def num_sampled(self) -> np.ndarray:
        """int64 [U] sampled tokens of each sequence."""
        return np.array([np.count_nonzero(mask) for mask in self.loss_masks], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What the optimizer and the loss use in one training step."""

    learning_rate: float
    entropy: float
    """Weight of the entropy bonus."""
    kl: float
    """Weight of the divergence from the reference model."""


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A prompt with a fixed answer, whose log-probs tell which weights a model holds."""

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
    """BLAKE3 of the raw bytes."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What a version of the weights consists of, and how to tell that it arrived."""

    version: int
    tensors: tuple[TensorEntry, ...]
    content_hash: str
    """Over all names, shapes and checksums."""
    canary: tuple[ScoringRequest, ...]
    canary_logprobs: tuple[tuple[float, ...], ...]
    """The learner's own answer to each canary prompt under these weights."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file of a checkpoint, as the rank that wrote it sees it."""

    path: Path
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> SavedFile:
        """The file as it is now."""
        return cls(path, path.stat().st_size)
