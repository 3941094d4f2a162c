"""The delivery of new weights to the rollout workers while the learner continues to train.

    training loop    step t        publish v = t + 1    step t + 1      publish v + 1
    delivery         v - 1 ...  |  ........ v: workers fetch, load, run the canary  |  v + 1
                                ^                                                   ^
                     waits for the previous delivery                      delivered version = v

At most one delivery runs at a time, so `publish` waits for the previous delivery. Otherwise only
evaluations and checkpoints wait for a delivery. Admission uses the delivered version. With a
staleness limit of 0 the next batch therefore waits for the delivery. With a limit of 1, training
continues during the delivery.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from ludus.proto.errors import CanaryError, WeightSyncError
from ludus.proto.runs import DeliverySpan
from ludus.trainer.actors.processes import Learners, Workers
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import CancellingTaskGroup
from ludus.trainer.core.types import ScoringRequest


class Delivery:
    """Publishes and delivers weights versions, one at a time.

    Args:
        timeout_s: time limit of a publication and of a delivery.
        on_delivered: called after each delivery with its version and period, and the largest
            difference between the canary log-probs of a worker and the learner's.
    """

    grace_s = 10.0
    """Extra time in which the store may report a more exact reason for its failure."""

    def __init__(
        self,
        learners: Learners,
        workers: Workers,
        canary: Sequence[ScoringRequest],
        timeout_s: float,
        on_delivered: Callable[[DeliverySpan, float], Awaitable[None]],
    ) -> None:
        self._learners = learners
        self._workers = workers
        self._canary = canary
        self._timeout_s = timeout_s
        self._on_delivered = on_delivered
        self._delivery_task: asyncio.Task[None] | None = None

    async def publish(self, version: int, tasks: CancellingTaskGroup) -> int:
        """Publish a version, start its delivery as one of `tasks`, and return its size in bytes."""
        await self.wait()
        try:
            async with asyncio.timeout(self._timeout_s + self.grace_s):
                published_weights = await self._learners.publish(version, self._canary)
        except TimeoutError:
            raise WeightSyncError(
                f"weights version {version} could not be published within weights.timeout_s = "
                f"{self._timeout_s:g}; check that the store responds, or raise the limit"
            ) from None
        self._delivery_task = tasks.start(self._deliver(published_weights))
        return published_weights.manifest.num_bytes

    async def wait(self) -> None:
        """Wait until no delivery is running."""
        if self._delivery_task is not None:
            await asyncio.shield(self._delivery_task)

    async def _deliver(self, published_weights: PublishedWeights) -> None:
        start_s = time.time()
        try:
            loaded_weights = await self._workers.load_weights(published_weights, self._timeout_s)
        except CanaryError:
            raise
        except WeightSyncError:
            # If the learner died, its loss is the cause: the published bytes may be gone with it.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.grace_s):
                    await self._learners.ping()
            raise
        delivery = DeliverySpan(
            version=published_weights.manifest.version, start_s=start_s, end_s=time.time()
        )
        max_error = max((weights.canary.error for weights in loaded_weights), default=0.0)
        await self._on_delivered(delivery, max_error)
