"""Training and resuming on several ranks, compared with one rank."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.optim.optimizer import register_optimizer_step_post_hook

from ludus.proto.config import (
    AlgorithmConfig,
    GrpoConfig,
    LanguageModelRun,
    ModelCritic,
    PpoConfig,
)
from ludus.trainer.actors.learner import LearnerActor
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.abandonment import StepAbandonedError
from ludus.trainer.learner.learner import Learner
from ludus.trainer.learner.process_group import leave_process_group
from tests.learner.tiny_policy import make_batch, make_learner, make_policy_folder

pytestmark = pytest.mark.slow

NUM_STEPS = 2


@dataclass(frozen=True)
class Case:
    """A training whose results must not depend on the number of ranks."""

    algorithm: AlgorithmConfig
    update_epochs: int = 1
    reduce_gradients: Literal["each", "last"] = "last"


CASES = {
    "grpo": Case(GrpoConfig(kl_coef=0.1, geometric_mask=None)),
    "grpo_reduced_each": Case(
        GrpoConfig(kl_coef=0.1, geometric_mask=None), reduce_gradients="each"
    ),
    "ppo": Case(PpoConfig(kl_coef=0.1, geometric_mask=None)),
    "model_critic": Case(
        PpoConfig(geometric_mask=None, critic=ModelCritic(learning_rate=3e-3)), update_epochs=2
    ),
}


@dataclass(frozen=True)
class TrainingResult:
    """Metrics and final weights of NUM_STEPS training steps."""

    step_metrics: list[list[float]]
    """Loss, gradient norm, entropy and value loss of each step."""
    weights: torch.Tensor


def train(num_ranks: int, folder: Path, kind: str, checkpoint_num_ranks: int | None = None) -> None:
    """Train this rank, save a checkpoint if none was loaded, and save the result on rank 0."""
    case = CASES[kind]
    learner = make_learner(
        str(folder / "model"),
        case.algorithm,
        num_minibatches=2,
        update_epochs=case.update_epochs,
        max_tokens_per_micro_batch=64,
        memory={"reduce_gradients": case.reduce_gradients},
    )
    if checkpoint_num_ranks:
        learner.load(folder / f"{kind}-checkpoint-{checkpoint_num_ranks}")
    metrics = [
        learner.train_step(
            make_batch(seed=step, num_prefix_tokens=5), Coefficients(1e-3, entropy=0.1, kl=0.1)
        )
        for step in range(NUM_STEPS)
    ]
    if not checkpoint_num_ranks:
        learner.save(folder / f"{kind}-checkpoint-{num_ranks}")
    weights = learner.gather_weights()
    if dist.get_rank() == 0:
        result = TrainingResult(
            [[row.loss, row.grad_norm, row.entropy, row.value_loss or 0.0] for row in metrics],
            torch.cat([tensor.flatten() for tensor in weights.values()]),
        )
        torch.save(result, get_result_path(num_ranks, folder, kind, checkpoint_num_ranks))


def train_with_abandoned_step(folder: Path) -> None:
    """Train, but abandon the second step in its second update, and resume from its checkpoint."""
    learner = make_ppo_learner(folder)
    coefficients = Coefficients(1e-3, entropy=0.1, kl=0.1)
    learner.train_step(make_batch(seed=0, num_prefix_tokens=5), coefficients)
    batch = make_batch(seed=1, num_prefix_tokens=5)
    weights_before = learner.gather_weights()
    if dist.get_rank() == 1:
        hook = register_optimizer_step_post_hook(
            lambda *_: learner.abandonment.request(7, discards_state=False)
        )
    with pytest.raises(StepAbandonedError) as error_info:
        learner.train_step(batch, coefficients, step_id=7, keeps_restore_point=True)
    assert error_info.value.outcome.is_restored
    if dist.get_rank() == 1:
        hook.remove()
    for name, weights in learner.gather_weights().items():
        assert torch.equal(weights, weights_before[name])
    learner.save(folder / "abandoned")
    learner = make_ppo_learner(folder)
    learner.load(folder / "abandoned")
    learner.train_step(batch, coefficients)
    weights = learner.gather_weights()
    if dist.get_rank() == 0:
        torch.save(torch.cat([tensor.flatten() for tensor in weights.values()]), folder / "resumed")


def make_ppo_learner(folder: Path) -> Learner:
    """Return a learner as in `train`, with two updates per step."""
    return make_learner(
        str(folder / "model"),
        CASES["ppo"].algorithm,
        num_minibatches=2,
        max_tokens_per_micro_batch=64,
    )


def join_ranks(rank: int, folder: str, num_ranks: int) -> None:
    """Connect this rank to the other ranks."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/store-{num_ranks}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)


def train_four_ranks(rank: int, folder: str) -> None:
    """Train one of four ranks, and save a checkpoint."""
    join_ranks(rank, folder, 4)
    train(4, Path(folder), "grpo")
    leave_process_group()


def train_two_ranks(rank: int, folder: str) -> None:
    """Train one of two ranks, first from the start and then from checkpoints of other ranks."""
    join_ranks(rank, folder, 2)
    for kind in CASES:
        train(2, Path(folder), kind)
        train(2, Path(folder), kind, checkpoint_num_ranks=1)
    train(2, Path(folder), "grpo", checkpoint_num_ranks=4)
    train_with_abandoned_step(Path(folder))
    leave_process_group()


def get_result_path(
    num_ranks: int, folder: Path, kind: str, checkpoint_num_ranks: int | None
) -> Path:
    return folder / f"{kind}-result-{num_ranks}-{checkpoint_num_ranks}.pt"


def load_result(
    num_ranks: int, folder: Path, kind: str, checkpoint_num_ranks: int | None = None
) -> TrainingResult:
    path = get_result_path(num_ranks, folder, kind, checkpoint_num_ranks)
    result: TrainingResult = torch.load(path, weights_only=False)
    return result


def assert_results_equal(result: TrainingResult, expected_result: TrainingResult) -> None:
    """Assert that metrics and weights are equal up to rounding errors."""
    for metrics, expected_metrics in zip(
        result.step_metrics, expected_result.step_metrics, strict=True
    ):
        assert metrics == pytest.approx(expected_metrics, abs=1e-5, rel=1e-5)
    # AdamW amplifies rounding errors of gradients near zero, so a few weights may differ.
    agreement_mask = (result.weights - expected_result.weights).abs() < 1e-5
    assert agreement_mask.float().mean() > 0.99


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train each algorithm on one and two ranks, and GRPO on four; return the results' folder."""
    folder = tmp_path_factory.mktemp("runs")
    make_policy_folder(folder / "model")
    for kind in CASES:
        train(1, folder, kind)
    mp.spawn(train_four_ranks, args=(str(folder),), nprocs=4)
    mp.spawn(train_two_ranks, args=(str(folder),), nprocs=2)
    for kind in CASES:
        train(1, folder, kind, checkpoint_num_ranks=2)
    train(1, folder, "grpo", checkpoint_num_ranks=4)
    return folder


def test_rendezvous_port_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    actor = LearnerActor(0, LanguageModelRun(), functions={})
    port = urlsplit(actor.rendezvous()).port
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", CASES)
def test_training_on_two_ranks_equals_training_on_one_rank(runs_folder: Path, kind: str) -> None:
    assert_results_equal(load_result(1, runs_folder, kind), load_result(2, runs_folder, kind))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", CASES)
def test_checkpoint_resumes_with_a_different_number_of_ranks(runs_folder: Path, kind: str) -> None:
    assert_results_equal(
        load_result(1, runs_folder, kind, checkpoint_num_ranks=2),
        load_result(2, runs_folder, kind, checkpoint_num_ranks=1),
    )


@pytest.mark.timeout(900)
def test_checkpoint_of_four_ranks_resumes_on_two_and_on_one(runs_folder: Path) -> None:
    assert_results_equal(load_result(1, runs_folder, "grpo"), load_result(4, runs_folder, "grpo"))
    expected_result = load_result(1, runs_folder, "grpo", checkpoint_num_ranks=2)
    for num_ranks in (1, 2):
        result = load_result(num_ranks, runs_folder, "grpo", checkpoint_num_ranks=4)
        assert_results_equal(result, expected_result)


@pytest.mark.timeout(900)
def test_step_abandoned_on_two_ranks_leaves_no_trace(runs_folder: Path) -> None:
    expected_weights = load_result(2, runs_folder, "ppo").weights
    assert torch.equal(torch.load(runs_folder / "resumed"), expected_weights)
