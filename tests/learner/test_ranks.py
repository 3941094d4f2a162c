"""Two ranks take the same steps as one rank, and resume from its checkpoints."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ludus.proto.config import (
    AlgorithmConfig,
    GrpoConfig,
    LanguageModelRun,
    ModelCritic,
    PpoConfig,
)
from ludus.trainer.actors.learner import LearnerActor
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.process_group import leave_process_group
from tests.learner.tiny_policy import make_batch, make_learner, make_policy_folder

pytestmark = pytest.mark.slow

NUM_STEPS = 2
ALGORITHMS: dict[str, AlgorithmConfig] = {
    "grpo": GrpoConfig(kl_coef=0.1, geometric_mask=None),
    "ppo": PpoConfig(kl_coef=0.1, geometric_mask=None),
    "model_critic": PpoConfig(geometric_mask=None, critic=ModelCritic(learning_rate=3e-3)),
}


@dataclass(frozen=True)
class TrainingResult:
    """The results of NUM_STEPS steps."""

    step_metrics: list[list[float]]
    """Loss, gradient norm, entropy and value loss of each step."""
    weights: torch.Tensor


def train(num_ranks: int, folder: Path, kind: str, resume_from: int | None = None) -> None:
    """Train on this rank; save a checkpoint and, from rank 0, the result."""
    learner = make_learner(
        str(folder / "model"),
        ALGORITHMS[kind],
        num_minibatches=2,
        update_epochs=2 if kind == "model_critic" else 1,
        max_tokens_per_micro_batch=64,
    )
    if resume_from:
        learner.load(folder / f"{kind}-checkpoint-{resume_from}")
    metrics = [
        learner.train_step(
            make_batch(seed=step, prefix_tokens=5), Coefficients(1e-3, entropy=0.1, kl=0.1)
        )
        for step in range(NUM_STEPS)
    ]
    if not resume_from:
        learner.save(folder / f"{kind}-checkpoint-{num_ranks}")
    state = learner.gather_weights()
    if dist.get_rank() == 0:
        result = TrainingResult(
            [[row.loss, row.grad_norm, row.entropy, row.value_loss or 0.0] for row in metrics],
            torch.cat([tensor.flatten() for tensor in state.values()]),
        )
        torch.save(result, get_result_path(num_ranks, folder, kind, resume_from))


def train_two_ranks(rank: int, folder: str) -> None:
    """Train as one of two ranks, from the start and from the checkpoint of one rank."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    for kind in ALGORITHMS:
        train(2, Path(folder), kind)
        train(2, Path(folder), kind, resume_from=1)
    leave_process_group()


def get_result_path(num_ranks: int, folder: Path, kind: str, resume_from: int | None) -> Path:
    """Return the path of a result."""
    return folder / f"{kind}-result-{num_ranks}-{resume_from}.pt"


def load_result(
    num_ranks: int, folder: Path, kind: str, resume_from: int | None = None
) -> TrainingResult:
    """Load a result."""
    path = get_result_path(num_ranks, folder, kind, resume_from)
    result: TrainingResult = torch.load(path, weights_only=False)
    return result


def assert_equal(result: TrainingResult, expected_result: TrainingResult) -> None:
    """Assert that numbers and weights are equal up to rounding."""
    for metrics, expected_metrics in zip(
        result.step_metrics, expected_result.step_metrics, strict=True
    ):
        assert metrics == pytest.approx(expected_metrics, abs=1e-5, rel=1e-5)
    # AdamW turns the rounding of a gradient near zero into a step of full size, so a few
    # weights may differ; the rest agree.
    agreement_mask = (result.weights - expected_result.weights).abs() < 1e-5
    assert agreement_mask.float().mean() > 0.99


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train everything on one rank, this process, and on two ranks; return the folder."""
    folder = tmp_path_factory.mktemp("runs")
    make_policy_folder(folder / "model")
    for kind in ALGORITHMS:
        train(1, folder, kind)
    mp.spawn(train_two_ranks, args=(str(folder),), nprocs=2)
    for kind in ALGORITHMS:
        train(1, folder, kind, resume_from=2)
    return folder


def test_rendezvous_port_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    rank = LearnerActor(0, LanguageModelRun(), functions={})
    port = urlsplit(rank.rendezvous()).port
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_training_on_two_ranks_equals_training_on_one_rank(runs_folder: Path, kind: str) -> None:
    assert_equal(load_result(1, runs_folder, kind), load_result(2, runs_folder, kind))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_checkpoint_resumes_with_a_different_number_of_ranks(runs_folder: Path, kind: str) -> None:
    assert_equal(
        load_result(1, runs_folder, kind, resume_from=2),
        load_result(2, runs_folder, kind, resume_from=1),
    )
