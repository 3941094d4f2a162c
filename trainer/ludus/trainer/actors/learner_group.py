"""The learner's ranks as one object: what the controller talks to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from ludus.proto.config import LanguageModelRun, WeightStoreConfig
from ludus.proto.errors import LearnerLostError
from ludus.trainer.actors.cluster import while_waiting
from ludus.trainer.actors.deaths import reason_of
from ludus.trainer.actors.learner import LearnerActor
from ludus.trainer.actors.placement import Placement
from ludus.trainer.core.functions import registered_functions
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import TimeLimitError, gather_or_cancel, wait_with_limit
from ludus.trainer.core.types import Coefficients, SavedFile, ScoringRequest
from ludus.trainer.learner.learner import LearnerSpec, StepMetrics
from ludus.trainer.setup.shared_folder import FolderToken

_STARTS_WITH = {
    "answer": "the learner's ranks to start",
    "rendezvous": "learner rank 0 to say where the ranks meet",
    "start": "the learner's ranks to meet and load the model",
}


class LearnerGroup:
    """All ranks of the learner; each call goes to all of them and returns rank 0's answer.

    A rank that dies leaves the others waiting in a collective. So the first rank that is lost,
    by its death or because a collective or a call ran out of time, ends them all; the call that was
    under way, and every later one, raises LearnerLostError until `restart`.
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

    async def start(self, spec: LearnerSpec, weights: WeightStoreConfig) -> None:
        """Start the ranks, which meet and load the model.

        Raises:
            ConfigError: a rank does not share the run's folder with the driver.
            LearnerLostError: a rank died over it, or it took too long.
        """
        self._spec, self._weights = spec, weights
        config = self._config
        self._ranks = [
            ray.remote(**self._placement.of_rank(rank))(LearnerActor).remote(
                rank, config.num_threads, registered_functions()
            )
            for rank in range(config.num_ranks)
        ]
        # Nobody refuses it its room: nodes that were lost are replaced, sooner or later.
        answers = self._all("answer", self._token)
        await while_waiting(self._placement, answers, refuse=False)
        if self._token is not None:
            await asyncio.to_thread(self._token.check_replies, config.num_ranks)
        [address] = await self._call("rendezvous", self._ranks[:1])
        await self._all("start", address, len(self._ranks), spec, weights)

    async def restart(self, learner_folder: Path | None) -> None:
        """Replace all ranks; they continue from a checkpoint or from the first model."""
        self._end_ranks()
        await self.start(self._spec, self._weights)
        if learner_folder is not None:
            await self.load(learner_folder)

    async def train_step(self, batch: ray.ObjectRef, coefficients: Coefficients) -> StepMetrics:
        """What the step did; the ranks of a machine map the same memory."""
        return await self._all("train_step", batch, coefficients)

    async def publish(self, version: int, canary: Sequence[ScoringRequest]) -> PublishedWeights:
        """The version, fetchable."""
        return await self._all("publish", version, canary)

    async def score_completions(self, prompts: Sequence[ScoringRequest]) -> list[list[float]]:
        """The log-probs of each prompt's completion under the policy."""
        return await self._all("score_completions", list(prompts))

    async def ping(self) -> None:
        """Return when every rank has responded."""
        await self._all("ping")

    async def save(self, state_folder: Path, model_folder: Path) -> list[SavedFile]:
        """Write the learner's state, and the model as a Hugging Face folder: all ranks' files."""
        folders = state_folder.absolute(), model_folder.absolute()
        written = await self._call("save", self._ranks, *folders)
        return [file for of_rank in written for file in of_rank]

    async def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        await self._all("load", folder.absolute())

    def close(self) -> None:
        """End the ranks, with what they do."""
        self._end_ranks()

    async def _all(self, method: str, *args: object) -> Any:
        """Rank 0's answer to a call of all ranks."""
        return (await self._call(method, self._ranks, *args))[0]

    async def _call(self, method: str, ranks: Sequence[ActorHandle], *args: object) -> list[Any]:
        if not ranks:
            raise LearnerLostError("the learner's ranks were lost and have not been restarted")
        answers = gather_or_cancel(*(_answer(rank, method, *args) for rank in ranks))
        try:
            return await self._limited(method, answers)
        except ray.exceptions.RayActorError as error:
            self._end_ranks()
            raise LearnerLostError(
                f"a learner rank died in '{method}': {reason_of(error)}"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, LearnerLostError):
                raise
            self._end_ranks()
            raise error.cause from None
        except TimeLimitError as error:
            self._end_ranks()
            raise LearnerLostError(str(error)) from None

    async def _limited(self, method: str, answers: Awaitable[list[Any]]) -> list[Any]:
        """The answers to a call, each kind of which has its limit."""
        if method in _STARTS_WITH:
            what, setting = _STARTS_WITH[method], "placement.start_timeout_s"
            return await wait_with_limit(
                answers, what, timeout_s=self._start_timeout_s, setting=setting
            )
        what, setting = f"the learner's '{method}'", "training.learner_timeout_s"
        return await wait_with_limit(answers, what, timeout_s=self._call_timeout_s, setting=setting)

    def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)


async def _answer(rank: ActorHandle, method: str, *args: object) -> Any:
    return await getattr(rank, method).remote(*args)
