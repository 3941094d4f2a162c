"""Equality of the weights learned from a remote and a local environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ludus.env.serving.subprocess import LocalServer
from ludus.proto.config import NetworkRun, make_run_config
from ludus.proto.runs import Resume
from ludus.trainer.classic.run import train


def make_run(folder: Path, environment: dict[str, str]) -> NetworkRun:
    """Return the configuration of a short run in `environment`."""
    return make_run_config(
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
@pytest.mark.long
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_remote_and_local_environments_produce_identical_weights(
    tmp_path: Path, env_id: str
) -> None:
    target = f"gymnasium:{env_id}"
    local_folder = train(
        make_run(tmp_path / "local", {"package": target}), resume=Resume.NEVER, overwrite=False
    )
    with LocalServer(target) as server:
        assert server.addresses is not None
        remote_environment = {"kind": "remote", "address": server.addresses.grpc}
        remote_folder = train(
            make_run(tmp_path / "remote", remote_environment), resume=Resume.NEVER, overwrite=False
        )
    policy_path = "checkpoints/step-00000004/learner/agent.pt"
    local_policy, remote_policy = (
        torch.load(folder / policy_path)["policy"] for folder in (local_folder, remote_folder)
    )
    assert local_policy.keys() == remote_policy.keys()
    for name, values in local_policy.items():
        assert torch.equal(values, remote_policy[name]), f"different weights: {name}"
