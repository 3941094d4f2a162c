"""The example's agent is trained as a function and as a program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import TRANSCRIPTS_FILE
from tests.e2e.runs import start_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("shared_ray"),
]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "agents" / "tiny.toml"
SHORT_RUN = (
    "training.num_steps=2",
    "rollout.num_groups_in_flight=4",
    "model.width=64",
    "model.num_heads=2",
    "model.intermediate=128",
    "model.warm_start_epochs=2",
    "eval.num_games=4",
    "eval.num_games_during=0",
)
FUNCTION_OVERRIDES = ("training.groups_per_step=4", "model.warm_start_games=128")
PROGRAM_OVERRIDES = (
    "environments.boxes.agent="
    + json.dumps(
        {
            "command": [sys.executable, "examples/agents/tool_loop.py"],
            "folder": str(ROOT),
            "max_concurrent": 2,
        }
    ),
    "training.groups_per_step=1",
    "learner.num_minibatches=1",
    "rollout.group_size=2",
    "rollout.num_groups_in_flight=1",
    "model.warm_start_games=4",
    "eval.num_games=2",
)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(FUNCTION_OVERRIDES, id="function", marks=pytest.mark.long),
        pytest.param(PROGRAM_OVERRIDES, id="program", marks=pytest.mark.long),
    ],
)
def test_example_agent_trains_without_failed_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.chdir(ROOT)
    with start_run(tmp_path, *SHORT_RUN, *overrides, config=EXAMPLE) as run:
        summary = run.finish()
    steps = [row.values for row in run.rows if row.kind == "train"]
    assert len(steps) == 2
    assert sum(step[TrainMetric.NUM_FAILED_AGENTS] for step in steps) == 0
    assert sum(step[TrainMetric.NUM_EPISODES_FAILED] for step in steps) == 0
    assert summary.results["boxes"].report.policy.num_games > 0
    first_transcript = json.loads((run.folder / TRANSCRIPTS_FILE).read_text().splitlines()[0])
    assert first_transcript["turns"][0]["shown"][-1]["text"] == "Where is the key?"
