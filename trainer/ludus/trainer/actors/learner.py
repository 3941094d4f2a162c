"""Learner ranks as Ray actors: one process per rank, joined by torch.distributed."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from ludus.proto.config import FolderWeightStore, RayWeightStore, S3WeightStore, WeightStoreConfig
from ludus.trainer.actors.weight_store import RayStore
from ludus.trainer.interfaces import PublishedWeights, WeightStore
from ludus.trainer.learner.learner import Learner, LearnerSpec, StepMetrics
from ludus.trainer.types import Batch, Coefficients, Probe
from ludus.trainer.weights import FolderStore, make_manifest

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class LearnerActor:
    """One rank. Every call but `rendezvous` must reach all ranks."""

    def __init__(self, rank: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._rank = rank

    def rendezvous(self) -> str:
        """An address at which the ranks can meet; asked of rank 0."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def start(
        self, address: str, num_ranks: int, spec: LearnerSpec, weights: WeightStoreConfig
    ) -> None:
        """Nothing; joins the ranks and loads the model."""
        os.environ["LOCAL_RANK"] = str(self._rank)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend,
            init_method=address,
            rank=self._rank,
            world_size=num_ranks,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        self._learner = Learner(spec)
        self._store = make_store(weights) if self._rank == 0 else None

    def train_step(self, batch: Batch, coefficients: Coefficients) -> StepMetrics:
        """What the step did, equal on all ranks."""
        return self._learner.train_step(batch, coefficients)

    def publish(self, version: int, probe: Probe) -> PublishedWeights | None:
        """The version in the store, from rank 0; None from the others."""
        state = self._learner.full_state()
        [answer] = self._learner.answer_logprobs([probe])
        if self._store is None:
            return None
        return self._store.publish(make_manifest(version, state, probe, answer), state)

    def answer_logprobs(self, probes: Sequence[Probe]) -> list[list[float]]:
        """The log-probs of each probe's completion under the policy."""
        return self._learner.answer_logprobs(probes)

    def save(self, state_folder: Path, model_folder: Path) -> None:
        """Nothing; writes this rank's part of a checkpoint, and from rank 0 the model."""
        self._learner.save(state_folder)
        self._learner.export_model(model_folder)

    def load(self, folder: Path) -> None:
        """Nothing; goes on from a checkpoint."""
        self._learner.load(folder)


def make_store(config: WeightStoreConfig) -> WeightStore:
    """The store that the configuration names; a folder's path must be resolved."""
    match config:
        case RayWeightStore():
            return RayStore(config.keep_versions)
        case FolderWeightStore():
            assert config.path is not None
            return FolderStore(Path(config.path), config.keep_versions)
        case S3WeightStore():
            raise NotImplementedError
