"""Two ranks take the step that one rank takes, and continue from its checkpoints."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ludus.proto.config import AlgorithmConfig, GrpoConfig, ModelCritic, PpoConfig
from ludus.trainer.actors.learner import LearnerActor
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.process_group import leave_process_group
from tests.learner.tiny_policy import make_batch, make_learner, make_policy_folder

pytestmark = pytest.mark.slow

NUM_STEPS = 2
ALGORITHMS: dict[str, AlgorithmConfig] = {
    "grpo": GrpoConfig(kl_coef=0.1, geometric_mask=None),
    "ppo": PpoConfig(kl_coef=0.1, geometric_mask=None),
    "own_critic": PpoConfig(geometric_mask=None, critic=ModelCritic(learning_rate=3e-3)),
}


@dataclass(frozen=True)
class Outcome:
    """What one run of NUM_STEPS steps came to."""

    numbers: list[list[float]]
    """Loss, norm of the gradient, entropy and value loss of each step."""
    weights: torch.Tensor


def train(num_ranks: int, folder: Path, kind: str, resume_from: int | None = None) -> None:
    """Run on this rank; leave its checkpoint and, from rank 0, its outcome."""
    learner = make_learner(
        str(folder / "model"),
        ALGORITHMS[kind],
        num_minibatches=2,
        update_epochs=2 if kind == "own_critic" else 1,
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
    state = learner.full_state()
    if dist.get_rank() == 0:
        outcome = Outcome(
            [[m.loss, m.grad_norm, m.entropy, m.value_loss or 0.0] for m in metrics],
            torch.cat([tensor.flatten() for tensor in state.values()]),
        )
        torch.save(outcome, outcome_path(num_ranks, folder, kind, resume_from))


def train_two_ranks(rank: int, folder: str) -> None:
    """Run everything as one of two ranks, again and from one rank's checkpoint."""
    torch.set_num_threads(1)
    meeting_place = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=meeting_place, rank=rank, world_size=2)
    for kind in ALGORITHMS:
        train(2, Path(folder), kind)
        train(2, Path(folder), kind, resume_from=1)
    leave_process_group()


def outcome_path(num_ranks: int, folder: Path, kind: str, resume_from: int | None) -> Path:
    """Where a run leaves its outcome."""
    return folder / f"{kind}-outcome-{num_ranks}-{resume_from}.pt"


def outcome_of(num_ranks: int, folder: Path, kind: str, resume_from: int | None = None) -> Outcome:
    """What a run came to."""
    path = outcome_path(num_ranks, folder, kind, resume_from)
    outcome: Outcome = torch.load(path, weights_only=False)
    return outcome


def assert_equal(one: Outcome, two: Outcome) -> None:
    """Assert that numbers and weights are the same but for rounding."""
    for first, second in zip(one.numbers, two.numbers, strict=True):
        assert first == pytest.approx(second, abs=1e-5, rel=1e-5)
    # AdamW turns the rounding of a gradient near zero into a step of full size, so a few
    # weights may differ; the rest agree.
    agree = (one.weights - two.weights).abs() < 1e-5
    assert agree.float().mean() > 0.99


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one rank, this process, and two ranks have run everything."""
    folder = tmp_path_factory.mktemp("runs")
    make_policy_folder(folder / "model")
    for kind in ALGORITHMS:
        train(1, folder, kind)
    mp.spawn(train_two_ranks, args=(str(folder),), nprocs=2)
    for kind in ALGORITHMS:
        train(1, folder, kind, resume_from=2)
    return folder


def test_nobody_can_take_the_port_at_which_ranks_will_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    rank = LearnerActor(0, num_threads=1, functions={})
    port = urlsplit(rank.rendezvous()).port
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_loss_gradient_and_weights_agree_between_one_and_two_ranks(runs: Path, kind: str) -> None:
    assert_equal(outcome_of(1, runs, kind), outcome_of(2, runs, kind))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_checkpoint_continues_with_another_number_of_ranks(runs: Path, kind: str) -> None:
    assert_equal(outcome_of(1, runs, kind, resume_from=2), outcome_of(2, runs, kind, resume_from=1))
