"""Errors of Gymformer's functions for invalid arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.compat.gymformer.env.cot_env import CoTEnv
from ludus.trainer.compat.gymformer.env.rlhf_env import RLHFEnv
from ludus.trainer.compat.gymformer.rl.ppo import load_ppo_agent
from ludus.trainer.compat.gymformer.rl.transformers_nn import LMActorNetwork, LMCriticNetwork
from ludus.trainer.compat.gymformer.trainer import train_reward
from tests.compat.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", ["a b c 0 1 2 3"])


def assert_error(function: Callable[..., Any], message: str, **arguments: Any) -> None:
    with pytest.raises((ConfigError, NotFoundError), match=message):
        function(**arguments)


def score_zero(prompts: Any, completions: Any) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ref_model_name": 5}, "^ref_model_name = 5 must be a path"),
        ({"ref_model_name": "./none"}, "^ref_model_name = './none'"),
        ({"dataset": "none.jsonl"}, "^dataset = 'none.jsonl' does not exist"),
        ({"kl_coef": -1}, "^kl_coef = -1 must be a number of 0 or more"),
        ({"kl_coef": float("nan")}, "^kl_coef = nan must be a number"),
        ({"max_generation": "5"}, "^max_generation = '5' must be a whole number of 1 or more"),
        ({"max_generation": 1.5}, "^max_generation = 1.5 must be a whole number of 1 or more"),
        ({"device": "abacus"}, "^device = 'abacus' cannot be used"),
        ({"seed": -2}, "^seed = -2 must be a whole number of 0 or more"),
    ],
)
def test_invalid_arguments_of_the_rlhf_environment_are_refused(
    model: str, changes: dict[str, Any], message: str
) -> None:
    arguments = {"ref_model_name": model, "reward_model": score_zero, "dataset": ["a b"]}
    assert_error(RLHFEnv, message, **{**arguments, **changes})


def test_error_of_an_invalid_reward_model_starts_with_the_argument_name(model: str) -> None:
    environment = RLHFEnv(model, Path(model), ["a b"], max_generation=1)
    environment.reset(seed=0)
    assert_error(environment.step, "^reward_model = .*must be a reward model", action=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name": 5}, "^model_name = 5 must be a path"),
        ({"dataset_path": 5}, "^dataset_path = 5 must be a path"),
        ({"dataset_path": "none.jsonl"}, "^dataset_path = 'none.jsonl' does not exist"),
        ({"test_split": "x"}, "^test_split = 'x' must be a number of 0 or more, below 1"),
        ({"seed": 1.5}, "^seed = 1.5 must be a whole number of 0 or more"),
    ],
)
def test_invalid_arguments_of_the_cot_environment_are_refused(
    model: str, changes: dict[str, Any], message: str
) -> None:
    assert_error(CoTEnv, message, **{"model_name": model, **changes})


@pytest.mark.parametrize("action", ["x", -1, 10**6, None])
def test_action_outside_the_vocabulary_is_refused(model: str, action: Any) -> None:
    environment = CoTEnv(model, seed=np.int64(3), max_generation=np.int64(2))
    environment.reset()
    assert_error(environment.step, "^action must be a token id from 0 to", action=action)
    environment.step(torch.tensor(5))
    assert_error(environment.reset, "^options must be a dictionary or None, got 5", options=5)


@pytest.mark.parametrize("network", [LMActorNetwork, LMCriticNetwork])
def test_errors_of_networks_start_with_the_argument_name(
    network: type[nn.Module], model: str
) -> None:
    assert_error(network, "^model_name = 5 must be a path", model_name=5, pad_token_id=0)
    assert_error(network, "^model_name = './none'", model_name="./none", pad_token_id=0)
    assert_error(
        network,
        "^pad_token_id = 'x' must be a whole number of 0 or more",
        model_name=model,
        pad_token_id="x",
    )
    valid_network = network(Path(model), np.int64(0))
    assert_error(valid_network, "^state must contain at least one token", state=torch.tensor([]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name": "./none"}, "^model_name = './none'"),
        ({"datasets_path": "none.jsonl"}, "^datasets_path = 'none.jsonl' does not exist"),
        (
            {"reward_model_path": __file__},
            "^reward_model_path = .* exists and is not the folder of a reward model",
        ),
        ({"resume_checkpoint": 5, "dry_run": False}, "^resume_checkpoint = 5 must be a path"),
        ({"dry_run": "no"}, "^dry_run = 'no' must be True or False"),
        ({"device": 5}, "^device = 5 must be None or a string"),
        ({"weight_decay": 1}, "weight_decay: expected a value less than 1, got 1"),
        ({"learning_rate": 2}, "learning_rate: expected a value less than or equal to 1, got 2"),
    ],
)
def test_invalid_arguments_of_train_reward_are_refused(
    model: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    rows = [{"prompt": f"p{n}", "chosen": "a", "rejected": "b"} for n in range(8)]
    dataset_path = tmp_path / "rows.jsonl"
    dataset_path.write_text("\n".join(map(json.dumps, rows)))
    arguments = {
        "model_name": model,
        "datasets_path": dataset_path,
        "reward_model_path": tmp_path / "rm",
    }
    assert_error(train_reward, message, **{**arguments, "dry_run": True, **changes})


def test_an_invalid_agent_file_is_refused(tmp_path: Path) -> None:
    actor, critic, agent_path = nn.Linear(4, 2), nn.Linear(4, 1), tmp_path / "agent.pth"
    weights = {"actor": actor.state_dict(), "critic": critic.state_dict()}
    torch.save({"actor": weights["actor"]}, agent_path)
    arguments = {"path": agent_path, "actor": actor, "critic": critic}
    assert_error(load_ppo_agent, "the file lacks 'critic'", **arguments)
    torch.save(weights, agent_path)
    for changes, message in (
        ({"path": None}, "^path = None must be a path"),
        ({"actor": "x"}, "^actor = 'x' must be a torch module"),
        ({"device": "abacus"}, "^device = 'abacus' cannot be used"),
        ({"actor": nn.Linear(4, 3)}, "size mismatch"),
    ):
        assert_error(load_ppo_agent, message, **{**arguments, **changes})
    agent_path.write_text("hello world")
    assert_error(load_ppo_agent, "torch.save did not write the file", **arguments)
