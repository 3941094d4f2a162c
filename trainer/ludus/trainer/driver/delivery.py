"""Brings new weights to the rollout workers while the learner trains on.

    training loop    step t        publish v = t + 1    step t + 1      publish v + 1
    delivery         v - 1 ...  |  ........ v: workers fetch, load, answer the canary  |  v + 1
                                ^                                                      ^
                     waits for the delivery before: at most one is under way    held_version = v

`publish` waits for the delivery before it; nothing waits for a delivery otherwise but who asks
for `settled` (an evaluation, a checkpoint) and admission, which counts from `held_version`. So
with a staleness bound of 0 the next batch waits for it, and with 1 training continues beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ludus.proto.errors import CanaryError, WeightSyncError
from ludus.trainer.actors.processes import Learners, Workers
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import Tasks
from ludus.trainer.core.types import ScoringRequest

_GRACE_S = 10.0
"""A store that gives up by itself says more about why than can be said here."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A version that all workers hold."""

    version: int
    duration_s: float
    worst_error: float
    """Largest difference between the canary log-probs of a worker and the learner's."""


class Delivery:
    """Publishes versions and delivers them, one after the other."""

    def __init__(
        self,
        learners: Learners,
        workers: Workers,
        canary: Sequence[ScoringRequest],
        timeout_s: float,
        on_delivered: Callable[[Delivered], Awaitable[None]],
    ) -> None:
        self._learners = learners
        self._workers = workers
        self._canary = canary
        self._timeout_s = timeout_s
        self._on_delivered = on_delivered
        self._under_way: asyncio.Task[None] | None = None

    async def publish(self, version: int, tasks: Tasks) -> int:
        """The bytes of the version, which is now on its way to the workers.

        Raises:
            WeightSyncError: it was not published in time. A delivery that fails is a task of
                `tasks` that fails.
        """
        await self.settled()
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                published = await self._learners.publish(version, self._canary)
        except TimeoutError:
            raise WeightSyncError(
                f"weights version {version} could not be published within weights.timeout_s = "
                f"{self._timeout_s:g}; see that the store answers, or raise it"
            ) from None
        self._under_way = tasks.start(self._deliver(published))
        return published.manifest.num_bytes

    async def settled(self) -> None:
        """Wait until no delivery is under way."""
        if self._under_way is not None:
            await asyncio.shield(self._under_way)

    async def _raise_if_learner_is_lost(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._learners.ping()

    async def _deliver(self, published: PublishedWeights) -> None:
        started = time.monotonic()
        try:
            held = await self._workers.load_weights(published, self._timeout_s)
        except CanaryError:
            raise
        except WeightSyncError:
            # What a learner published may be gone with it. Then its loss is what went wrong.
            await self._raise_if_learner_is_lost()
            raise
        worst = max((weights.canary_error for weights in held), default=0.0)
        duration_s = time.monotonic() - started
        await self._on_delivered(Delivered(published.manifest.version, duration_s, worst))
