"""Learner ranks as Ray actors: one process per rank, joined by torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from ludus.env.runtime import freeze_heap
from ludus.proto.config import WeightStoreConfig
from ludus.proto.errors import LearnerLostError
from ludus.trainer.actors.weight_store import make_store
from ludus.trainer.core.functions import Function, register_functions
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.types import Batch, Coefficients, SavedFile, ScoringRequest
from ludus.trainer.learner.device import select_device
from ludus.trainer.learner.learner import Learner, LearnerSpec, StepMetrics
from ludus.trainer.setup.shared_folder import FolderToken
from ludus.trainer.weights import cast_floats, make_manifest


class LearnerActor:
    """One rank. Every call but `answer` and `rendezvous` must reach all ranks."""

    def __init__(self, rank: int, num_threads: int, functions: Mapping[str, Function]) -> None:
        register_functions(functions)
        torch.set_num_threads(num_threads)
        self._rank = rank
        self._timeout_s = 0.0

    def answer(self, token: FolderToken | None) -> None:
        """Answer the token of the run's folder, in which this rank will write."""
        if token is not None:
            token.reply(self._rank)

    def rendezvous(self) -> str:
        """An address at which the ranks can meet; rank 0, who is asked, listens there already."""
        host = ray.util.get_node_ip_address()
        # Kept: whoever else of this process asks for the same port shares the store behind it.
        self._meeting_place = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, multi_tenant=True
        )
        return f"tcp://{host}:{self._meeting_place.port}"

    def start(
        self, address: str, num_ranks: int, spec: LearnerSpec, weights: WeightStoreConfig
    ) -> None:
        """Join the ranks and load the model."""
        device = select_device(self._rank)
        has_gpu = device.type == "cuda"
        self._timeout_s = spec.config.collective_timeout_s
        with self._meeting_others():
            dist.init_process_group(
                "nccl" if has_gpu else "gloo",
                init_method=address,
                rank=self._rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=self._timeout_s),
                device_id=device if has_gpu else None,
            )
            self._learner = Learner(spec)
        self._store = make_store(weights) if self._rank == 0 else None
        self._published_dtype = weights.published_dtype(spec.config.dtype)
        freeze_heap()

    def train_step(self, batch: Batch, coefficients: Coefficients) -> StepMetrics:
        """What the step did, equal on all ranks."""
        with self._meeting_others():
            return self._learner.train_step(batch, coefficients)

    def publish(self, version: int, canary: Sequence[ScoringRequest]) -> PublishedWeights | None:
        """The version in the store, from rank 0; None from the others."""
        with self._meeting_others():
            state = self._learner.full_state()
            answers = self._learner.score_completions(canary)
        if self._store is None:
            return None
        state = cast_floats(state, self._published_dtype)
        return self._store.publish(make_manifest(version, state, canary, answers), state)

    def score_completions(self, prompts: Sequence[ScoringRequest]) -> list[list[float]]:
        """The log-probs of each prompt's completion under the policy."""
        with self._meeting_others():
            return self._learner.score_completions(prompts)

    def ping(self) -> None:
        """Return, which proves that the rank is alive and idle."""

    def save(self, state_folder: Path, model_folder: Path) -> list[SavedFile]:
        """Write this rank's part of a checkpoint, and from rank 0 the model: the rank's files."""
        with self._meeting_others():
            written = self._learner.save(state_folder)
            return written + self._learner.export_model(model_folder)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        with self._meeting_others():
            self._learner.load(folder)

    @contextmanager
    def _meeting_others(self) -> Iterator[None]:
        """Names a collective that failed for what it is: ranks that no longer meet."""
        try:
            yield
        except RuntimeError as error:
            # torch has classes for some of these errors, and for gloo's only their text.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise LearnerLostError(
                f"rank {self._rank} no longer reaches the others, or waited for them longer than "
                f"learner.collective_timeout_s = {self._timeout_s:g}: {error}"
            ) from error
