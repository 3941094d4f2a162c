"""The learner: its ranks as Ray actors, and all ranks as one object for the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ludus.env.runtime import freeze_heap, pause_collection

with pause_collection():
    import ray
    import torch
    import torch.distributed as dist
    from ray.actor import ActorHandle

    from ludus.proto.config import LanguageModelRun, WeightStoreConfig
    from ludus.proto.errors import ConfigError, LearnerLostError, LearnerMemoryError
    from ludus.trainer.actors.cluster import describe_failure, wait_for_room
    from ludus.trainer.actors.gpus import limit_visible_gpus, use_expandable_segments
    from ludus.trainer.actors.placement import Placement
    from ludus.trainer.actors.processes import Learners
    from ludus.trainer.actors.weight_store import make_store
    from ludus.trainer.core.functions import Function, copy_registered_functions, register_functions
    from ludus.trainer.core.interfaces import PublishedWeights
    from ludus.trainer.core.output import warn_user
    from ludus.trainer.core.tasks import TimeLimitError, gather_or_cancel, wait_with_limit
    from ludus.trainer.core.types import Batch, Coefficients, SavedFile, ScoringRequest
    from ludus.trainer.data.buffer import BatchHandle
    from ludus.trainer.learner.abandonment import (
        AbandonedStep,
        RestorePoint,
        StepAbandonedError,
    )
    from ludus.trainer.learner.learner import Learner
    from ludus.trainer.learner.out_of_memory import is_out_of_memory, make_memory_error
    from ludus.trainer.learner.process_group import select_device
    from ludus.trainer.learner.step_metrics import StepMetrics
    from ludus.trainer.setup.shared_folder import FolderToken
    from ludus.trainer.weights.payload import cast_floats, make_manifest

_START_CALLS = {
    "reply": "the learner's ranks to start",
    "rendezvous": "learner rank 0 to return its address",
    "start": "the learner's ranks to connect and load the model",
}
"""Descriptions of the calls that start the ranks, by method."""
_CONTROL_GROUP = "control"
"""Ray's concurrency group of the calls that do not wait for the current step."""


class LearnerActor:
    """One rank of the learner. Calls except `reply` and `rendezvous` must be made on all ranks."""

    def __init__(self, rank: int, run: LanguageModelRun, functions: Mapping[str, Function]) -> None:
        limit_visible_gpus()
        use_expandable_segments()
        register_functions(functions)
        self._rank = rank
        self._run = run

    def reply(self, folder_token: FolderToken | None) -> None:
        """Reply to the token, to show that this rank shares the run's folder."""
        if folder_token is not None:
            folder_token.reply(self._rank)

    def rendezvous(self) -> str:
        """Listen for the other ranks, and return the address; for rank 0 only."""
        host = ray.util.get_node_ip_address()
        # The store must stay open: torch reuses it in this process, by its port.
        self._rendezvous_store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, multi_tenant=True
        )
        return f"tcp://{host}:{self._rendezvous_store.port}"

    def start(self, address: str, model_path: str, weights: WeightStoreConfig) -> None:
        """Connect to the other ranks and load the model."""
        # Not in the constructor: Ray runs the methods in another thread, and the number is a
        # thread's own.
        torch.set_num_threads(self._run.learner.known_num_threads)
        device = select_device(self._run.learner.num_gpus_per_rank)
        has_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if has_gpu else "gloo",
            init_method=address,
            rank=self._rank,
            world_size=self._run.learner.num_ranks,
            timeout=timedelta(seconds=self._run.learner.collective_timeout_s),
            device_id=device if has_gpu else None,
        )
        self._learner = Learner(self._run, model_path)
        self._store = make_store(weights) if self._rank == 0 else None
        if has_gpu:
            # Free the memory that only loading needed, for a worker that shares the GPU.
            torch.cuda.empty_cache()
        self._published_dtype = weights.choose_dtype(self._run.learner.dtype)
        freeze_heap()

    def train_step(
        self,
        batch: Batch,
        coefficients: Coefficients,
        step_id: int,
        keeps_restore_point: bool = False,
    ) -> StepMetrics | AbandonedStep:
        """Train on a batch, and return the outcome, which is equal on all ranks."""
        try:
            return self._learner.train_step(
                batch, coefficients, step_id=step_id, keeps_restore_point=keeps_restore_point
            )
        except StepAbandonedError as abandonment:
            return abandonment.outcome
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise make_memory_error(self._rank, batch, self._run.learner, error) from None

    @ray.method(concurrency_group=_CONTROL_GROUP)
    def abandon_step(self, step_id: int, discards_state: bool) -> None:
        """Request to abandon a step; runs in another thread than the step."""
        self._learner.abandonment.request(step_id, discards_state=discards_state)

    @ray.method(concurrency_group=_CONTROL_GROUP)
    def copy_start_of_step(self) -> tuple[bool, RestorePoint | None]:
        """Return whether there is a copy of the state from before the step, and the copy.

        Runs in another thread than the step, which may wait for another rank forever.
        """
        restore_point = self._learner.abandonment.copy_start()
        return restore_point is not None, restore_point

    def restore(self, restore_point: RestorePoint) -> None:
        """Restore the state that `copy_start_of_step` of an earlier process returned."""
        self._learner.abandonment.restore(restore_point)

    def publish(self, version: int, canary: Sequence[ScoringRequest]) -> PublishedWeights | None:
        """Publish the weights from rank 0; return None on the other ranks."""
        weights = self._learner.gather_weights()
        canary_logprobs = self._learner.score_completions(canary)
        rounding_error = self._learner.measure_rounding(canary, canary_logprobs)
        if self._store is None:
            return None
        weights = cast_floats(weights, self._published_dtype)
        manifest = make_manifest(version, weights, canary, canary_logprobs, rounding_error)
        return self._store.publish(manifest, weights)

    def score_completions(self, requests: Sequence[ScoringRequest]) -> list[list[float]]:
        """Return the log-probs of each completion's tokens under the policy."""
        return self._learner.score_completions(requests)

    def compute_mean_loss(self, batch: Batch) -> float:
        """Return the mean negative log-prob of the batch's sampled tokens."""
        return self._learner.compute_mean_loss(batch)

    def ping(self) -> None:
        """Return immediately, to show that the rank is alive and idle."""

    def save(self, state_folder: Path, model_folder: Path) -> list[SavedFile]:
        """Save this rank's part of a checkpoint and of the model, and return the files."""
        return self._learner.save(state_folder) + self._learner.export_model(model_folder)

    def export_model(self, folder: Path) -> None:
        """Save this rank's part of the model."""
        self._learner.export_model(folder)

    def load(self, folder: Path) -> None:
        """Restore the state of a checkpoint."""
        self._learner.load(folder)


class LearnerGroup(Learners):
    """All ranks of the learner; each call goes to all ranks and returns rank 0's result.

    If a rank dies, the other ranks wait for it in a collective. So all ranks are killed if one
    dies, or if a collective or a call times out. The current call and all later
    calls raise LearnerLostError, until `restart`.

    If a rank runs out of memory in a step, all ranks are replaced and train the batch again in
    smaller micro-batches (`learner/out_of_memory.py`).
    """

    def __init__(
        self,
        run: LanguageModelRun,
        placement: Placement,
        folder_token: FolderToken | None = None,
        reduced_max_tokens: int | None = None,
    ) -> None:
        """`reduced_max_tokens` is the value in the checkpoint from which the run resumes."""
        self._run = run
        self._placement = placement
        self._folder_token = folder_token
        self.ranks: list[ActorHandle] = []
        """Actors of the ranks; empty if the learner is lost."""
        self._step_id = 0
        self._is_abandoned = False
        """True if the driver requested to abandon the current step."""
        self._is_replacing_ranks = False
        """True while new ranks start, which have no step to abandon."""
        self._reduced_max_tokens: int | None = None
        if reduced_max_tokens is not None:
            self._limit_micro_batches(reduced_max_tokens)

    @property
    def reduced_max_tokens(self) -> int | None:
        return self._reduced_max_tokens

    async def start(self, model_path: str, weights: WeightStoreConfig) -> None:
        """Start the ranks, which connect to each other and load the model.

        Raises:
            ConfigError: a rank does not share the run's folder with the driver.
            LearnerLostError: a rank died during the start, or the start took too long.
        """
        self._model_path, self._weights = model_path, weights
        functions, num_ranks = copy_registered_functions(), self._run.learner.num_ranks
        for rank in range(num_ranks):
            options = self._placement.make_rank_options(rank)
            actor_class = ray.remote(**options, concurrency_groups={_CONTROL_GROUP: 1})(
                LearnerActor
            )
            self.ranks.append(actor_class.remote(rank, self._run, functions))
        # Missing room is no error here, because lost nodes are usually replaced.
        replies = self._call_all("reply", self._folder_token)
        await wait_for_room(self._placement, replies, raises_without_room=False)
        if self._folder_token is not None:
            await asyncio.to_thread(self._folder_token.check_replies, num_ranks)
        [address] = await self._call("rendezvous", self.ranks[:1])
        await self._call_all("start", address, model_path, weights)

    async def restart(self, learner_folder: Path | None) -> None:
        self.close()
        await self.start(self._model_path, self._weights)
        if learner_folder is not None:
            await self.load(learner_folder)

    async def train_step(
        self,
        batch: BatchHandle,
        coefficients: Coefficients,
        *,
        keeps_restore_point: bool = False,
        wait_for_fetches: Callable[[], Awaitable[None]] | None = None,
    ) -> StepMetrics | AbandonedStep:
        self._is_abandoned = self._is_replacing_ranks = False
        while not self._is_abandoned:
            self._step_id += 1
            try:
                return await self._call_all(
                    "train_step", batch, coefficients, self._step_id, keeps_restore_point
                )
            except LearnerMemoryError as error:
                if wait_for_fetches is not None:
                    await wait_for_fetches()
                self._is_replacing_ranks = True
                await self._replace_ranks(error)
                self._is_replacing_ranks = False
        return AbandonedStep(is_restored=True)

    async def abandon_step(self, *, discards_state: bool) -> None:
        self._is_abandoned = True
        if self.ranks and not self._is_replacing_ranks:
            await self._call_all("abandon_step", self._step_id, discards_state)

    async def publish(self, version: int, canary: Sequence[ScoringRequest]) -> PublishedWeights:
        return await self._call_all("publish", version, canary)

    async def score_completions(self, requests: Sequence[ScoringRequest]) -> list[list[float]]:
        return await self._call_all("score_completions", list(requests))

    async def compute_mean_loss(self, batch: Batch) -> float:
        """Return the mean negative log-prob of the batch's sampled tokens, without an update."""
        mean_loss: float = await self._call_all("compute_mean_loss", batch)
        return mean_loss

    async def ping(self) -> None:
        await self._call_all("ping")

    async def save(self, state_folder: Path, model_folder: Path) -> list[SavedFile]:
        folders = state_folder.absolute(), model_folder.absolute()
        files_by_rank = await self._call("save", self.ranks, *folders)
        return [file for files in files_by_rank for file in files]

    async def export_model(self, folder: Path) -> None:
        """Write the Hugging Face model, without the state of the optimizer."""
        await self._call_all("export_model", folder.absolute())

    async def load(self, folder: Path) -> None:
        """Restore the state of a checkpoint."""
        await self._call_all("load", folder.absolute())

    def close(self) -> None:
        """Kill the ranks."""
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            ray.kill(rank)

    async def _replace_ranks(self, error: LearnerMemoryError) -> None:
        """Replace all ranks by ranks with smaller micro-batches and the state before the step.

        Raises:
            LearnerLostError: a rank has changed its state in the step, or does not return its
                state.
        """
        old_limit = self._run.learner.known_max_tokens_per_micro_batch
        self._limit_micro_batches(error.max_tokens)
        warn_user(
            f"{error}; training the step again with learner.max_tokens_per_micro_batch = "
            f"{error.max_tokens} instead of {old_limit}; set the new value in the configuration, "
            "so that the next run does not repeat the step"
        )
        # Only references to the copies pass through this process.
        copies = [rank.copy_start_of_step.options(num_returns=2).remote() for rank in self.ranks]
        has_copies = await self._gather_results("copy_start_of_step", [flag for flag, _ in copies])
        self.close()
        if not all(has_copies):
            raise LearnerLostError(
                f"{error}; the step cannot be trained again after its first update of the weights"
            )
        await self.start(self._model_path, self._weights)
        pairs = zip(self.ranks, copies, strict=True)
        await self._gather_results(
            "restore", [rank.restore.remote(copy) for rank, (_, copy) in pairs]
        )

    def _limit_micro_batches(self, max_tokens: int) -> None:
        """Use at most this number of tokens per micro-batch in processes that start later."""
        if max_tokens < self._run.learner.known_max_tokens_per_micro_batch:
            self._reduced_max_tokens = max_tokens
            update = {"max_tokens_per_micro_batch": max_tokens}
            learner = self._run.learner.model_copy(update=update)
            self._run = self._run.model_copy(update={"learner": learner})

    async def _call_all(self, method: str, *args: object) -> Any:
        """Call all ranks, and return rank 0's result."""
        return (await self._call(method, self.ranks, *args))[0]

    async def _call(self, method: str, ranks: Sequence[ActorHandle], *args: object) -> list[Any]:
        if not ranks:
            raise LearnerLostError("the learner's ranks were lost and have not been restarted")
        return await self._gather_results(
            method, [getattr(rank, method).remote(*args) for rank in ranks]
        )

    async def _gather_results(self, method: str, calls: Sequence[ray.ObjectRef]) -> list[Any]:
        """Return the results of a method's calls, in the order of the ranks."""
        description, setting = f"the learner's '{method}'", "training.learner_timeout_s"
        timeout_s = self._run.training.learner_timeout_s
        if method in _START_CALLS:
            description, setting = _START_CALLS[method], "placement.start_timeout_s"
            timeout_s = self._run.placement.start_timeout_s
        results = gather_or_cancel(*map(_get_result, calls))
        try:
            return await wait_with_limit(results, description, timeout_s=timeout_s, setting=setting)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            self.close()
            raise LearnerLostError(
                f"a learner rank died in '{method}': {describe_failure(error)}"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LearnerMemoryError):
                raise error.cause from None
            if isinstance(error.cause, ConfigError):
                self.close()  # the other ranks may wait for this rank forever
                raise error.cause from None
            if not _has_lost_contact(error.cause):
                raise
            self.close()
            raise LearnerLostError(
                f"a learner rank lost contact with the others in '{method}', or waited for them "
                "longer than learner.collective_timeout_s = "
                f"{self._run.learner.collective_timeout_s:g}: {error.cause}"
            ) from None
        except TimeLimitError as error:
            self.close()
            raise LearnerLostError(str(error)) from None


def _has_lost_contact(error: BaseException) -> bool:
    """Return whether a collective failed; Gloo raises a plain RuntimeError."""
    is_gloo_error = isinstance(error, RuntimeError) and "gloo" in str(error)
    return is_gloo_error or isinstance(error, dist.DistError)


async def _get_result(call: ray.ObjectRef) -> Any:
    return await call
