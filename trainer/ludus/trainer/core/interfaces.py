"""The interfaces between the components of the trainer, and the values that cross them."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.core.types import SampledCompletion, Sampling, ScoringRequest, WeightManifest

StateDict = Mapping[str, torch.Tensor]
"""Full tensors on the CPU, by their names in the Hugging Face model."""


class GenerateFunction(Protocol):
    """A function that samples one completion.

    Concurrent calls are sampled as one batch. The random numbers of a call depend only on its seed.
    """

    def __call__(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        seed: int,
        answers: AnswerTrie | None = None,
        /,
    ) -> Awaitable[SampledCompletion]:
        """Sample a completion of the prompt; with `answers`, the completion is one of these."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for an engine."""

    request_id: int
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    """Seed of the request's random numbers."""
    answers: AnswerTrie | None = None
    """Answers to which the completion is restricted; None if it is not restricted. The log-probs
    are those of the restricted distribution."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The completion of an EngineRequest."""

    request_id: int
    token_ids: list[int]
    logprobs: list[float]
    has_end_token: bool
    """False if the completion reached its maximum number of tokens."""


class Engine(Protocol):
    """An inference engine. It is not thread-safe, so one thread owns it."""

    def submit(self, request: EngineRequest) -> None:
        """Add a request to the running batch.

        If the engine refuses a request and raises, the other requests continue.
        """

    def abort(self, request_ids: Collection[int]) -> None:
        """Cancel these requests. Unknown and completed requests are ignored."""

    def step(self) -> list[EngineOutput]:
        """Advance the batch by one step and return the completed requests."""

    @property
    def has_work(self) -> bool:
        """True while a submitted request has no output yet."""

    def load_weights(self, state: StateDict) -> None:
        """Use these weights from the next step on."""

    def score(self, request: ScoringRequest) -> list[float]:
        """Return the log-probs of the completion's tokens under the current weights."""

    def close(self) -> None:
        """Release memory and stop processes."""


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """One stored file of a weights version: complete tensors, or a difference from a version."""

    version: int
    content_hash: str
    """Content hash of the version that the payload completes."""
    num_bytes: int
    location: object
    """File name, object key or Ray reference; only the storage that returned it can use it."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A weights version that workers can fetch."""

    manifest: WeightManifest
    payloads: tuple[StoredPayload, ...]
    """Payloads of the version, the complete one first."""


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """A weights version that a worker has fetched, and the cost of the fetch."""

    state: StateDict
    """Tensors, which must not be changed: the next version may be fetched as a difference."""
    num_bytes: int
    """Number of fetched bytes. It is less than the tensors' size if differences were fetched."""
    fetch_s: float
    """Duration of the fetch in seconds, including the check of the bytes."""
