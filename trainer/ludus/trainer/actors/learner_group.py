"""All ranks of the learner as one object, for the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from ludus.proto.config import LanguageModelRun, WeightStoreConfig
from ludus.proto.errors import LearnerLostError
from ludus.trainer.actors.cluster import wait_for_room
from ludus.trainer.actors.failure_text import describe_failure
from ludus.trainer.actors.learner import LearnerActor
from ludus.trainer.actors.placement import Placement
from ludus.trainer.core.functions import registered_functions
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import TimeLimitError, gather_or_cancel, wait_with_limit
from ludus.trainer.core.types import Coefficients, SavedFile, ScoringRequest
from ludus.trainer.data.buffer import BatchHandle
from ludus.trainer.learner.learner import LearnerSpec, StepMetrics
from ludus.trainer.setup.shared_folder import FolderToken

_START_CALLS = {
    "reply": "the learner's ranks to start",
    "rendezvous": "learner rank 0 to return its address",
    "start": "the learner's ranks to connect and load the model",
}
"""Descriptions of the calls that start the ranks, by method."""


class LearnerGroup:
    """All ranks of the learner; each call goes to all ranks and returns rank 0's result.

    A rank that dies leaves the others waiting in a collective. So if a rank is lost, because it
    died or a collective or a call timed out, all ranks are killed. The current call and all later
    calls raise LearnerLostError, until `restart`.
    """

    def __init__(
        self, run: LanguageModelRun, placement: Placement, token: FolderToken | None = None
    ) -> None:
        self._config = run.learner
        self._start_timeout_s = run.placement.start_timeout_s
        self._call_timeout_s = run.training.learner_timeout_s
        self._placement = placement
        self._token = token
        self._ranks: list[ActorHandle] = []

    @property
    def ranks(self) -> Sequence[ActorHandle]:
        """Actors of the ranks; empty if the learner is lost."""
        return self._ranks

    async def start(self, spec: LearnerSpec, weights: WeightStoreConfig) -> None:
        """Start the ranks, which connect to each other and load the model.

        Raises:
            ConfigError: a rank does not share the run's folder with the driver.
            LearnerLostError: a rank died during the start, or the start took too long.
        """
        self._spec, self._weights = spec, weights
        config = self._config
        self._ranks = [
            ray.remote(**self._placement.rank_options(rank))(LearnerActor).remote(
                rank, config.num_threads, registered_functions()
            )
            for rank in range(config.num_ranks)
        ]
        # Missing room is not refused, because lost nodes are replaced sooner or later.
        replies = self._call_all("reply", self._token)
        await wait_for_room(self._placement, replies, refuse=False)
        if self._token is not None:
            await asyncio.to_thread(self._token.check_replies, config.num_ranks)
        [address] = await self._call("rendezvous", self._ranks[:1])
        await self._call_all("start", address, len(self._ranks), spec, weights)

    async def restart(self, learner_folder: Path | None) -> None:
        """Replace all ranks; they resume from a checkpoint or from the first model."""
        self._kill_ranks()
        await self.start(self._spec, self._weights)
        if learner_folder is not None:
            await self.load(learner_folder)

    async def train_step(self, batch: BatchHandle, coefficients: Coefficients) -> StepMetrics:
        """Train on a batch, whose memory the ranks of a machine share, and return the metrics."""
        return await self._call_all("train_step", batch, coefficients)

    async def publish(self, version: int, canary: Sequence[ScoringRequest]) -> PublishedWeights:
        """Publish the weights as `version`, so that workers can fetch them."""
        return await self._call_all("publish", version, canary)

    async def score_completions(self, requests: Sequence[ScoringRequest]) -> list[list[float]]:
        """Return the log-probs of each completion's tokens under the policy."""
        return await self._call_all("score_completions", list(requests))

    async def ping(self) -> None:
        """Return when every rank has responded."""
        await self._call_all("ping")

    async def save(self, state_folder: Path, model_folder: Path) -> list[SavedFile]:
        """Write the learner's state and the Hugging Face model; return the files of all ranks."""
        folders = state_folder.absolute(), model_folder.absolute()
        files_by_rank = await self._call("save", self._ranks, *folders)
        return [file for files in files_by_rank for file in files]

    async def load(self, folder: Path) -> None:
        """Restore the state of a checkpoint."""
        await self._call_all("load", folder.absolute())

    def close(self) -> None:
        """Kill the ranks."""
        self._kill_ranks()

    async def _call_all(self, method: str, *args: object) -> Any:
        """Call all ranks, and return rank 0's result."""
        return (await self._call(method, self._ranks, *args))[0]

    async def _call(self, method: str, ranks: Sequence[ActorHandle], *args: object) -> list[Any]:
        if not ranks:
            raise LearnerLostError("the learner's ranks were lost and have not been restarted")
        results = gather_or_cancel(*(_call_rank(rank, method, *args) for rank in ranks))
        try:
            return await self._wait(method, results)
        except ray.exceptions.RayActorError as error:
            self._kill_ranks()
            raise LearnerLostError(
                f"a learner rank died in '{method}': {describe_failure(error)}"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, LearnerLostError):
                raise
            self._kill_ranks()
            raise error.cause from None
        except TimeLimitError as error:
            self._kill_ranks()
            raise LearnerLostError(str(error)) from None

    async def _wait(self, method: str, results: Awaitable[list[Any]]) -> list[Any]:
        """Wait for results, with the time limit of the method."""
        if method in _START_CALLS:
            return await wait_with_limit(
                results,
                _START_CALLS[method],
                timeout_s=self._start_timeout_s,
                setting="placement.start_timeout_s",
            )
        return await wait_with_limit(
            results,
            f"the learner's '{method}'",
            timeout_s=self._call_timeout_s,
            setting="training.learner_timeout_s",
        )

    def _kill_ranks(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)


async def _call_rank(rank: ActorHandle, method: str, *args: object) -> Any:
    return await getattr(rank, method).remote(*args)
