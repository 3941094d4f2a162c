"""What is learned on a server, stepped in one call, is what is learned in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ludus.env.serving.subprocess import LocalServer
from ludus.proto.config import NetworkRun, run_config_from
from ludus.proto.runs import Resume
from ludus.trainer.classic.run import train


def run_of(folder: Path, environment: dict[str, str]) -> NetworkRun:
    """A short run in the environment."""
    return run_config_from(
        {
            "name": "short",
            "output_dir": str(folder),
            "environment": environment,
            "kind": "network",
            "model": {"hidden": [16]},
            "ppo": {"num_environments": 4, "steps_per_environment": 32, "num_epochs": 2},
            "training": {"num_steps": 4},
            "eval": {"num_games": 4, "num_games_during": 0},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_a_server_teaches_the_same_to_the_bit(tmp_path: Path, env_id: str) -> None:
    package = f"gymnasium:{env_id}"
    here = train(
        run_of(tmp_path / "here", {"package": package}), resume=Resume.NEVER, overwrite=False
    )
    with LocalServer(package) as server:
        assert server.addresses is not None
        remote = {"kind": "remote", "address": server.addresses.grpc}
        there = train(run_of(tmp_path / "there", remote), resume=Resume.NEVER, overwrite=False)
    file = "checkpoints/step-00000004/learner/agent.pt"
    one, other = (torch.load(folder / file)["policy"] for folder in (here, there))
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert torch.equal(values, other[name]), name
