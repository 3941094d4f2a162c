"""The replay buffer as a Ray actor: groups come from the workers, and leave it as batches.

    driver    begin ------------------> [ played ]
    workers   put --------------------> [ waits ] ---- take ----> batch, in Ray's object store
                                                        |             |
                                    what is in it, to the driver      +--> learner ranks

The driver never holds a token of them: it passes on references. `take` waits for `put`; nothing
waits for `take` but admission, in the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle

from ludus.env.runtime import freeze_heap
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import BufferLostError
from ludus.trainer.actors.deaths import reason_of
from ludus.trainer.actors.placement import Placement
from ludus.trainer.core.functions import Function, register_functions, registered_functions
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.core.tasks import TimeLimitError, wait_with_limit
from ludus.trainer.core.types import Batch, RolloutGroup
from ludus.trainer.data.batch import make_batch, shuffle_rewards
from ludus.trainer.data.buffer import BufferState, GroupBuffer, Refusal, TakenBatch, summarize
from ludus.trainer.data.counts import RolloutCounts


class BufferActor:
    """Holds groups from their beginning to their training; calls interleave on one event loop."""

    def __init__(self, run: LanguageModelRun, functions: Mapping[str, Function]) -> None:
        """`functions` are what the run names and nobody can import."""
        register_functions(functions)
        self._run = run
        self._buffer = GroupBuffer(
            groups_per_step=run.training.groups_per_step,
            max_staleness=run.training.max_staleness,
            window_fraction=run.training.window_fraction,
            keep_zero_variance_groups=run.algorithm.zero_variance_groups == "keep",
        )
        self._changed = asyncio.Condition()
        self._num_restored = 0
        freeze_heap()

    async def begin(self, indices: Iterable[int], version: int) -> None:
        """See GroupBuffer.begin."""
        self._buffer.begin(indices, version)

    async def put(self, groups: Sequence[RolloutGroup]) -> list[Refusal]:
        """See GroupBuffer.put."""
        refused = self._buffer.put(groups)
        async with self._changed:
            self._changed.notify_all()
        return refused

    async def take(self, version: int, timeout_s: float) -> tuple[TakenBatch, Batch | None]:
        """What is in batch `version`, and the batch; nothing when `timeout_s` have passed."""
        groups: list[RolloutGroup] = []
        num_restored = self._num_restored

        def is_over() -> bool:
            if self._num_restored != num_restored:
                # Who asked was about to train on what is no longer held, and asks no more.
                return True
            groups.extend(self._buffer.take(version))
            return bool(groups)

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(is_over)
        if not groups:
            return TakenBatch((), self._buffer.counts, len(self._buffer)), None
        summaries = tuple(summarize(group, version) for group in groups)
        taken = TakenBatch(summaries, self._buffer.take_counts(), len(self._buffer))
        return taken, await asyncio.to_thread(self._make_batch, groups, version)

    async def state(self) -> BufferState:
        """See GroupBuffer.state."""
        return self._buffer.state()

    async def restore(
        self, groups: Iterable[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int:
        """See GroupBuffer.restore."""
        self._num_restored += 1
        return self._buffer.restore(groups, counts, version)

    def _make_batch(self, groups: Sequence[RolloutGroup], version: int) -> Batch:
        if self._run.training.shuffle_rewards:
            draw = make_random(self._run.seed, Stream.REWARD_SHUFFLE, version)
            groups = shuffle_rewards(groups, draw)
        return make_batch(groups, self._run.algorithm)


class RemoteBuffer:
    """A BufferActor in a process of its own.

    When it dies, or does not answer for training.idle_timeout_s, `take`, `state` and `restore`
    raise BufferLostError. They are what the training loop calls between two steps, so the loss
    interrupts none, and the learner's state is one that can be saved. What the sampling loop calls
    keeps still instead.
    """

    def __init__(self, run: LanguageModelRun, placement: Placement) -> None:
        actor_class = ray.remote(**placement.beside_driver())(BufferActor)
        self._actor: ActorHandle = actor_class.remote(run, registered_functions())
        self._timeout_s = run.training.idle_timeout_s

    def close(self) -> None:
        """End the buffer, with what waits in it."""
        ray.kill(self._actor)

    async def begin(self, indices: Iterable[int], version: int) -> None:
        """See GroupBuffer.begin; without effect once the buffer is lost."""
        with suppress(BufferLostError):
            await self._prompt_answer("begin", list(indices), version)

    async def put(self, groups: ray.ObjectRef | list[RolloutGroup]) -> list[Refusal]:
        """See GroupBuffer.put; groups by reference come from where they were played.

        It waits for its cancellation once the buffer is lost: nothing can be said of the groups.
        """
        try:
            return await self._answer(self._actor.put.remote(groups))
        except BufferLostError:
            return await asyncio.get_running_loop().create_future()

    async def take(self, version: int, timeout_s: float) -> TakenBatch:
        """See BufferActor.take; the batch is a reference."""
        call = self._actor.take.options(num_returns=2)
        taken_reference, batch = call.remote(version, timeout_s)
        taken: TakenBatch = await self._in_time(taken_reference, "take")
        return replace(taken, batch=batch) if taken.groups else taken

    async def state(self) -> BufferState:
        """See GroupBuffer.state."""
        return await self._prompt_answer("state")

    async def restore(
        self, groups: Iterable[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int:
        """See GroupBuffer.restore."""
        return await self._prompt_answer("restore", list(groups), dict(counts), version)

    async def _prompt_answer(self, method: str, *arguments: object) -> Any:
        return await self._in_time(getattr(self._actor, method).remote(*arguments), method)

    async def _in_time(self, reference: ray.ObjectRef, method: str) -> Any:
        """The answer to a call that waits for nothing but the buffer.

        Raises:
            BufferLostError: the buffer has died, or does not answer.
        """
        try:
            return await wait_with_limit(
                self._answer(reference),
                f"the replay buffer's '{method}'",
                timeout_s=self._timeout_s,
                setting="training.idle_timeout_s",
            )
        except TimeLimitError as error:
            raise BufferLostError(str(error)) from None

    async def _answer(self, reference: ray.ObjectRef) -> Any:
        """The answer to a call.

        Raises:
            BufferLostError: the buffer has died.
            RayError: whoever made an argument of the call has.
        """
        try:
            return await reference
        except ray.exceptions.RayActorError as error:
            if error.actor_id != self._actor._actor_id.hex():
                raise
            raise BufferLostError(
                f"the replay buffer died, with all groups that waited in it: {reason_of(error)}"
            ) from error
