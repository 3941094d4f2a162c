"""The interfaces between the parts of the trainer, each with one implementation per backend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from ludus.trainer.core.types import SampledCompletion, Sampling, ScoringRequest, WeightManifest

StorageLocation: TypeAlias = Any
"""A file name, object key or Ray reference; only the weight store that created it can use it."""

StateDict = Mapping[str, torch.Tensor]
"""Full tensors on the CPU, by their names in the Hugging Face model."""


GenerateFn: TypeAlias = Callable[[list[int], Sampling, int], Awaitable[SampledCompletion]]
"""Samples one completion: (prompt tokens, sampling, seed); concurrent calls become one batch.

The random numbers depend only on the seed, not on the other requests of the batch.
"""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for an engine."""

    request_id: int
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    """Seed of the request's random numbers."""


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
        """Add a request to the running batch; a refused request does not affect the others."""

    def abort(self, request_ids: Collection[int]) -> None:
        """Cancel these requests; unknown and completed requests are ignored."""

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
class PublishedWeights:
    """A weights version that workers can fetch."""

    manifest: WeightManifest
    location: StorageLocation
    """Location of the bytes, in a form that only the publishing store understands."""


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """A weights version that a worker has fetched, and the cost of the fetch."""

    state: StateDict
    """Read-only tensors, because the next version may be a difference from them."""
    num_bytes: int
    """Number of bytes fetched; less than the size of the tensors if differences were fetched."""
    fetch_s: float
    """Duration of the fetch, including the check of its bytes."""
