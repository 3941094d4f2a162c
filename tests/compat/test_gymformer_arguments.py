"""What Gymformer's calls cannot do is refused by the names that were typed."""

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


def refused(call: Callable[..., Any], told: str, **given: Any) -> None:
    with pytest.raises((ConfigError, NotFoundError), match=told):
        call(**given)


def nothing(prompts: Any, answers: Any) -> list[float]:
    return [0.0 for _ in answers]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ref_model_name": 5}, "^ref_model_name expected a path, got 5"),
        ({"ref_model_name": "./none"}, "^ref_model_name = './none'"),
        ({"dataset": "none.jsonl"}, "^dataset = 'none.jsonl': nothing there"),
        ({"kl_coef": -1}, "^kl_coef expected a finite number of 0 or more, got -1"),
        ({"kl_coef": float("nan")}, "^kl_coef expected a finite number"),
        ({"max_generation": "5"}, "^max_generation expected at least 1, .*got '5'"),
        ({"max_generation": 1.5}, "^max_generation expected at least 1, .*got 1.5"),
        ({"device": "abacus"}, "^device = 'abacus' cannot be used"),
        ({"seed": -2}, "^seed expected at least 0, .*got -2"),
    ],
)
def test_an_rlhf_environment_is_not_made_of_it(
    model: str, given: dict[str, Any], told: str
) -> None:
    sound = {"ref_model_name": model, "reward_model": nothing, "dataset": ["a b"]}
    refused(RLHFEnv, told, **{**sound, **given})


def test_a_reward_model_that_is_none_is_told_by_its_argument(model: str) -> None:
    environment = RLHFEnv(model, Path(model), ["a b"], max_generation=1)
    environment.reset(seed=0)
    refused(environment.step, "^reward_model = .*must be a reward model", action=5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model_name": 5}, "^model_name expected a path, got 5"),
        ({"dataset_path": 5}, "^dataset_path expected a path, got 5"),
        ({"dataset_path": "none.jsonl"}, "^dataset_path = 'none.jsonl': nothing there"),
        ({"test_split": "x"}, "^test_split expected a finite number"),
        ({"seed": 1.5}, "^seed expected at least 0, .*got 1.5"),
    ],
)
def test_a_cot_environment_is_not_made_of_it(model: str, given: dict[str, Any], told: str) -> None:
    refused(CoTEnv, told, **{"model_name": model, **given})


@pytest.mark.parametrize("action", ["x", -1, 10**6, None])
def test_an_action_that_is_no_token_is_refused(model: str, action: Any) -> None:
    environment = CoTEnv(model, seed=np.int64(3), max_generation=np.int64(2))
    environment.reset()
    refused(environment.step, "^action expected a token from 0 to", action=action)
    environment.step(torch.tensor(5))
    refused(environment.reset, "^options expected a dictionary or None, got 5", options=5)


@pytest.mark.parametrize("network", [LMActorNetwork, LMCriticNetwork])
def test_a_networks_arguments_are_told_by_name(network: type[nn.Module], model: str) -> None:
    refused(network, "^model_name expected a path", model_name=5, pad_token_id=0)
    refused(network, "^model_name = './none'", model_name="./none", pad_token_id=0)
    refused(network, "^pad_token_id expected at least 0", model_name=model, pad_token_id="x")
    made = network(Path(model), np.int64(0))
    refused(made, "^state expected at least one token", state=torch.tensor([]))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model_name": "./none"}, "^model_name = './none'"),
        ({"datasets_path": "none.jsonl"}, "^datasets_path = 'none.jsonl': nothing there"),
        ({"reward_model_path": __file__}, "^reward_model_path = .* is there already"),
        ({"resume_checkpoint": 5, "dry_run": False}, "^resume_checkpoint expected a path, got 5"),
        ({"dry_run": "no"}, "^dry_run expected True or False, got 'no'"),
        ({"device": 5}, "^device expected None or a text"),
        ({"weight_decay": 1}, "weight_decay: input should be less than 1, got 1"),
        ({"learning_rate": 2}, "learning_rate: input should be less than or equal to 1, got 2"),
    ],
)
def test_a_reward_model_is_not_trained_so(
    model: str, tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    rows = [{"prompt": f"p{n}", "chosen": "a", "rejected": "b"} for n in range(8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    sound = {"model_name": model, "datasets_path": data, "reward_model_path": tmp_path / "rm"}
    refused(train_reward, told, **{**sound, "dry_run": True, **given})


def test_an_agent_that_cannot_be_loaded_is_told_why(tmp_path: Path) -> None:
    actor, critic, file = nn.Linear(4, 2), nn.Linear(4, 1), tmp_path / "agent.pth"
    weights = {"actor": actor.state_dict(), "critic": critic.state_dict()}
    torch.save({"actor": weights["actor"]}, file)
    sound = {"path": file, "actor": actor, "critic": critic}
    refused(load_ppo_agent, "it lacks 'critic'", **sound)
    torch.save(weights, file)
    for given, told in (
        ({"path": None}, "^path expected a path, got None"),
        ({"actor": "x"}, "^actor expected a torch module, got 'x'"),
        ({"device": "abacus"}, "^device = 'abacus' cannot be used"),
        ({"actor": nn.Linear(4, 3)}, "size mismatch"),
    ):
        refused(load_ppo_agent, told, **{**sound, **given})
    file.write_text("hello world")
    refused(load_ppo_agent, "torch.save did not write it", **sound)
