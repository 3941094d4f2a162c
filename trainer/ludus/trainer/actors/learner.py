"""Learner ranks as Ray actors: one process per rank, connected by torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from ludus.env.runtime import freeze_heap, pause_collection

with pause_collection():
    import ray
    import torch
    import torch.distributed as dist

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
    """One rank. Every call except `reply` and `rendezvous` must reach all ranks."""

    def __init__(self, rank: int, num_threads: int, functions: Mapping[str, Function]) -> None:
        register_functions(functions)
        torch.set_num_threads(num_threads)
        self._rank = rank
        self._timeout_s = 0.0

    def reply(self, token: FolderToken | None) -> None:
        """Reply to the token in the run's folder, where this rank will write."""
        if token is not None:
            token.reply(self._rank)

    def rendezvous(self) -> str:
        """Listen for the other ranks, and return the address; for rank 0 only."""
        host = ray.util.get_node_ip_address()
        # The store must stay open: torch reuses it in this process, by its port.
        self._rendezvous_store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, multi_tenant=True
        )
        return f"tcp://{host}:{self._rendezvous_store.port}"

    def start(
        self, address: str, num_ranks: int, spec: LearnerSpec, weights: WeightStoreConfig
    ) -> None:
        """Connect to the other ranks and load the model."""
        device = select_device(self._rank)
        has_gpu = device.type == "cuda"
        self._timeout_s = spec.config.collective_timeout_s
        with self._translate_errors():
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
        """Train on a batch, and return the metrics, which are equal on all ranks."""
        with self._translate_errors():
            return self._learner.train_step(batch, coefficients)

    def publish(self, version: int, canary: Sequence[ScoringRequest]) -> PublishedWeights | None:
        """Publish the weights from rank 0; return None on the other ranks."""
        with self._translate_errors():
            state = self._learner.full_state()
            canary_logprobs = self._learner.score_completions(canary)
        if self._store is None:
            return None
        state = cast_floats(state, self._published_dtype)
        return self._store.publish(make_manifest(version, state, canary, canary_logprobs), state)

    def score_completions(self, requests: Sequence[ScoringRequest]) -> list[list[float]]:
        """Return the log-probs of each completion's tokens under the policy."""
        with self._translate_errors():
            return self._learner.score_completions(requests)

    def ping(self) -> None:
        """Return immediately, to show that the rank is alive and idle."""

    def save(self, state_folder: Path, model_folder: Path) -> list[SavedFile]:
        """Save this rank's part of a checkpoint, and the model from rank 0; return the files."""
        with self._translate_errors():
            files = self._learner.save(state_folder)
            return files + self._learner.export_model(model_folder)

    def load(self, folder: Path) -> None:
        """Restore the state of a checkpoint."""
        with self._translate_errors():
            self._learner.load(folder)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise LearnerLostError if a collective fails because the ranks lost contact."""
        try:
            yield
        except RuntimeError as error:
            # torch has classes for some of these errors; those of gloo have only a text.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise LearnerLostError(
                f"rank {self._rank} lost contact with the other ranks, or waited for them longer "
                f"than learner.collective_timeout_s = {self._timeout_s:g}: {error}"
            ) from error
