"""The replay buffer as a Ray actor: workers add groups, and the learner takes batches.

    driver    begin ------------------> [ played ]
    workers   put --------------------> [ waits ] ---- take ----> batch, in Ray's object store
                                                        |             |
                                    summaries, to the driver          +--> learner ranks

The driver never receives tokens. It only passes references to batches and groups. `take` waits for
`put`. Only the admission of new groups, in the driver, waits for `take`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ludus.env.runtime import freeze_heap, pause_collection

with pause_collection():
    import ray
    from ray.actor import ActorHandle

    from ludus.proto.config import LanguageModelRun
    from ludus.proto.errors import BufferLostError
    from ludus.trainer.actors.cluster import describe_failure
    from ludus.trainer.actors.gpus import limit_visible_gpus
    from ludus.trainer.actors.placement import Placement
    from ludus.trainer.actors.processes import Buffer
    from ludus.trainer.core.functions import Function, copy_registered_functions, register_functions
    from ludus.trainer.core.streams import Stream, make_random
    from ludus.trainer.core.tasks import TimeLimitError, wait_with_limit
    from ludus.trainer.core.types import Batch, RolloutGroup
    from ludus.trainer.data.batch import make_batch, shuffle_rewards
    from ludus.trainer.data.buffer import BufferState, GroupBuffer, Refusal, TakenBatch, summarize
    from ludus.trainer.data.counts import RolloutCounts, choose_variance_test


class BufferActor:
    """A GroupBuffer in an actor; calls interleave on one event loop."""

    def __init__(self, run: LanguageModelRun, functions: Mapping[str, Function]) -> None:
        """`functions` are the run's functions that cannot be imported."""
        limit_visible_gpus()
        register_functions(functions)
        self._run = run
        self._buffer = GroupBuffer(
            groups_per_step=run.training.groups_per_step,
            max_staleness=run.training.max_staleness,
            window_fraction=run.training.window_fraction,
            keeps_zero_variance_groups=run.algorithm.zero_variance_groups == "keep",
            has_zero_variance=choose_variance_test(run.algorithm),
        )
        self._change_condition = asyncio.Condition()
        self._num_restored = 0
        freeze_heap()

    async def begin(
        self, indices: Iterable[int], version: int, final_indices: Container[int] = ()
    ) -> None:
        """See GroupBuffer.begin."""
        self._buffer.begin(indices, version, final_indices)

    async def put(self, groups: Sequence[RolloutGroup]) -> list[Refusal]:
        """See GroupBuffer.put."""
        refusals = self._buffer.put(groups)
        async with self._change_condition:
            self._change_condition.notify_all()
        return refusals

    async def take(self, version: int, timeout_s: float) -> tuple[TakenBatch, Batch | None]:
        """Return batch `version` and its summary; after a timeout, a summary without groups."""
        groups: list[RolloutGroup] = []
        num_restored = self._num_restored

        def is_finished() -> bool:
            if self._num_restored != num_restored:
                # `restore` replaced the groups, and the loop that called `take` has stopped.
                return True
            groups.extend(self._buffer.take(version))
            return bool(groups)

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._change_condition:
                await self._change_condition.wait_for(is_finished)
        if not groups:
            return TakenBatch((), self._buffer.counts, len(self._buffer)), None
        has_zero_variance = choose_variance_test(self._run.algorithm)
        summaries = tuple(summarize(group, version, has_zero_variance) for group in groups)
        batch_summary = TakenBatch(summaries, self._buffer.take_counts(), len(self._buffer))
        return batch_summary, await asyncio.to_thread(self._make_batch, groups, version)

    async def put_back(self, counts: Mapping[str, RolloutCounts]) -> None:
        """See GroupBuffer.put_back."""
        self._buffer.put_back(counts)

    async def copy_state(self) -> BufferState:
        """See GroupBuffer.copy_state."""
        return self._buffer.copy_state()

    async def restore(
        self, groups: Iterable[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int:
        """See GroupBuffer.restore."""
        self._num_restored += 1
        return self._buffer.restore(groups, counts, version)

    def _make_batch(self, groups: Sequence[RolloutGroup], version: int) -> Batch:
        if self._run.training.shuffle_rewards:
            generator = make_random(self._run.seed, Stream.REWARD_SHUFFLE, version)
            groups = shuffle_rewards(groups, generator)
        return make_batch(groups, self._run.algorithm)


class RemoteBuffer(Buffer):
    """A BufferActor in a separate process.

    If the process dies, or does not respond for training.idle_timeout_s, `take`, `put_back`,
    `copy_state` and `restore` raise BufferLostError. The training loop calls these methods between
    two steps, so no step is interrupted, and the learner's state can be saved. The methods that the
    sampling loop calls do not raise this error.
    """

    def __init__(self, run: LanguageModelRun, placement: Placement) -> None:
        actor_class = ray.remote(**placement.make_driver_node_options())(BufferActor)
        self._actor: ActorHandle = actor_class.remote(run, copy_registered_functions())
        self._timeout_s = run.training.idle_timeout_s

    def close(self) -> None:
        """Kill the buffer's process, with the groups in it."""
        ray.kill(self._actor)

    async def begin(
        self, indices: Iterable[int], version: int, final_indices: Container[int] = ()
    ) -> None:
        """See Buffer.begin; has no effect if the buffer is lost."""
        with suppress(BufferLostError):
            await self._call("begin", list(indices), version, final_indices)

    async def put(self, groups: ray.ObjectRef | list[RolloutGroup]) -> list[Refusal]:
        """See GroupBuffer.put; if `groups` is a reference, Ray sends them directly from the worker.

        If the buffer is lost, the call never returns, because the fate of the groups is unknown;
        its task must be cancelled.
        """
        try:
            return await self._await_result(self._actor.put.remote(groups))
        except BufferLostError:
            return await asyncio.get_running_loop().create_future()

    async def take(self, version: int, timeout_s: float) -> TakenBatch:
        """See Buffer.take; the batch is a reference."""
        call = self._actor.take.options(num_returns=2)
        summary_reference, batch_reference = call.remote(version, timeout_s)
        batch_summary: TakenBatch = await self._await_with_limit(summary_reference, "take")
        return replace(batch_summary, batch=batch_reference if batch_summary.groups else None)

    async def put_back(self, counts: Mapping[str, RolloutCounts]) -> None:
        await self._call("put_back", dict(counts))

    async def copy_state(self) -> BufferState:
        return await self._call("copy_state")

    async def restore(
        self, groups: Iterable[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int:
        return await self._call("restore", list(groups), dict(counts), version)

    async def _call(self, method: str, *arguments: object) -> Any:
        return await self._await_with_limit(getattr(self._actor, method).remote(*arguments), method)

    async def _await_with_limit(self, reference: ray.ObjectRef, method: str) -> Any:
        """Return the result of a call; fail after training.idle_timeout_s.

        Raises:
            BufferLostError: the buffer has died, or does not respond.
        """
        try:
            return await wait_with_limit(
                self._await_result(reference),
                f"the replay buffer's '{method}'",
                timeout_s=self._timeout_s,
                setting="training.idle_timeout_s",
            )
        except TimeLimitError as error:
            raise BufferLostError(str(error)) from None

    async def _await_result(self, reference: ray.ObjectRef) -> Any:
        """Return the result of a call.

        Raises:
            BufferLostError: the buffer has died.
            RayError: the process that produced an argument of the call has died.
        """
        try:
            return await reference
        except ray.exceptions.RayActorError as error:
            if error.actor_id != self._actor._actor_id.hex():
                raise
            raise BufferLostError(
                f"the replay buffer died, with all groups in it: {describe_failure(error)}"
            ) from error
