"""TRL's GRPOTrainer trains on our server, and our GRPOConfig has the same defaults as TRL's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from upstream_environment import build_virtual_environment

from ludus.env.client import EnvClient
from ludus.trainer.compat.trl.config import DEFAULTS
from tests.conformance.parties import TRL_PACKAGES, UPSTREAM_FOLDER, LudusServer

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1200)]

FIELDS_PROGRAM = """
import dataclasses, json
from trl import GRPOConfig
found = {}
for field in dataclasses.fields(GRPOConfig):
    has_factory = field.default is dataclasses.MISSING
    value = field.default_factory() if has_factory else field.default
    found[field.name] = getattr(value, "value", value)
print(json.dumps(found))
"""
ROWS_PROGRAM = """
import json, sys
sys.path.append(sys.argv[1])  # at the end, so that it only adds packages missing here
from datasets import Dataset
from ludus.trainer.compat.trl.inputs import PromptRows

columns = {"prompt": ["Word to echo:", "2 + 2 ="], "answer": [None, 4], "tags": [["a"], ["b", "c"]]}
print(json.dumps([dict(row) for row in PromptRows.read(Dataset.from_dict(columns), "rows").rows]))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """Return an interpreter with TRL and OpenEnv's client."""
    return build_virtual_environment("upstream-trl-1.16.0+openenv-0.10.0", TRL_PACKAGES)


def run_and_parse(command: list[Any]) -> Any:
    """Run the command; return the last line of its output, parsed as JSON."""
    completed_process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert completed_process.returncode == 0, completed_process.stderr[-3000:]
    return json.loads(completed_process.stdout.splitlines()[-1])


def test_defaults_equal_the_fields_of_grpo_config(python: Path) -> None:
    assert run_and_parse([python, "-I", "-c", FIELDS_PROGRAM]) == dict(DEFAULTS)


def test_hugging_face_dataset_is_read_as_rows(python: Path) -> None:
    upstream = next(python.parents[1].glob("lib/python*/site-packages"))
    assert run_and_parse([sys.executable, "-c", ROWS_PROGRAM, upstream]) == [
        {"prompt": "Word to echo:", "answer": None, "tags": ["a"]},
        {"prompt": "2 + 2 =", "answer": 4, "tags": ["b", "c"]},
    ]


@pytest.mark.parametrize("mode", ["rollout_func", "environment_factory"])
def test_trl_trains_on_the_ludus_server(
    python: Path, server: LudusServer, tmp_path: Path, mode: str
) -> None:
    program = UPSTREAM_FOLDER / "trl_trainer.py"
    output = run_and_parse([python, "-I", program, server.http_address, mode, tmp_path])
    assert (output["steps"], len(output["games"])) == (2, 8)
    # Our client must get the rewards that TRL used for the same seeds and actions.
    returns = []
    with EnvClient.connect(server.http_address) as client:
        for game in output["games"]:
            session, _ = client.open(seed=game["seed"])
            rewards = [session.step({"action_id": action}).reward for action in game["actions"]]
            assert rewards == game["rewards"]
            returns.append(sum(rewards))
    step_rewards = [sum(returns[:4]) / 4, sum(returns[4:]) / 4]
    assert output["rewards"] == pytest.approx(step_rewards)
