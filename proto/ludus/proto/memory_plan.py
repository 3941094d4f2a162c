"""The memory that a language-model run needs, as a check of the run prints it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MEMORY_PLAN_PREFIX = "memory plan: "
"""Prefix of the line with the MemoryPlan that a check of a run has computed."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MemoryPart(_Record):
    """Bytes of one kind in the memory of an owner."""

    name: str
    """Kind of the bytes, such as "weights"."""
    num_bytes: int


class MemoryUse(_Record):
    """The most memory that an owner needs at one time: a rank, a worker, a GPU or a node."""

    owner: str
    """Owner of the memory, such as "learner rank"."""
    memory_kind: str
    """Kind of the memory: "GPU" or "main memory"."""
    parts: tuple[MemoryPart, ...]
    num_available_bytes: int | None = None
    """Memory that the owner can use; None if it is unknown, or shared and listed elsewhere."""
    remedy: str = ""
    """Settings that lower the need, as an imperative; empty if there are none."""

    @property
    def num_bytes(self) -> int:
        """The sum of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """False if all parts together need more memory than there is."""
        return self.num_available_bytes is None or self.num_bytes <= self.num_available_bytes


class MemoryPlan(_Record):
    """The memory of a run's learner ranks, rollout workers and nodes."""

    uses: tuple[MemoryUse, ...]
    max_tokens_per_micro_batch: int
    """Value of learner.max_tokens_per_micro_batch, set or chosen."""
