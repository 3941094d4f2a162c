"""The seams of the trainer: each is one or two verbs, with one real version per backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ludus.trainer.core.types import Completion, Sampling, ScoringRequest, WeightManifest

StateDict = Mapping[str, torch.Tensor]
"""Full tensors on the CPU, by the names of the Hugging Face model."""


class GenerateFn(Protocol):
    """Samples one completion; many calls at once become one batch.

    The seed alone decides its random numbers, whatever else is sampled beside it.
    """

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> Completion: ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for an engine."""

    request_id: int
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    """Decides its random numbers."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The finished answer to an EngineRequest."""

    request_id: int
    token_ids: list[int]
    logprobs: list[float]
    stopped: bool


class Engine(Protocol):
    """What samples tokens. Not thread-safe: one thread owns it."""

    def submit(self, request: EngineRequest) -> None:
        """Take the request into the batch that runs; one that is refused harms no other."""

    def abort(self, request_ids: Collection[int]) -> None:
        """Spend no more work on these requests, as far as they are known and not answered."""

    def step(self) -> list[EngineOutput]:
        """What finished in one step of the batch; at least one step nearer to empty."""

    @property
    def has_work(self) -> bool:
        """True while a submitted request has no output yet."""

    def load_weights(self, state: StateDict) -> None:
        """Sample with these weights from the next step on."""

    def score(self, canary: ScoringRequest) -> list[float]:
        """Log-probs of the canary prompt's completion under the weights that would sample now."""

    def close(self) -> None:
        """Free memory and processes."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version that workers can fetch."""

    manifest: WeightManifest
    location: Any
    """Where the store keeps the bytes; only the store that published it can read it."""


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """A version as a worker got it, and what that took."""

    state: StateDict
    """Nobody may write to these: the next version may build on them."""
    num_bytes: int
    """Fetched for it: fewer than the tensors have where differences travel."""
    fetch_s: float
    """Including the check of all that was fetched."""
