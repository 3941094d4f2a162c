"""Each epoch uses each row of a data set once, even if the run is stopped and resumed.

A reward function records the row of each scored completion, and the test counts these rows.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from prompts_env import write_rows
from tests.e2e.runs import Run, start_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("shared_ray"),
]

NUM_ROWS = 48
GROUP_SIZE = 4

CONFIG = """
[environment]
package = "prompts_env"
rewards = [{{function = "tests.e2e.test_epochs:reward_length"}}]
options = {{path = {path}, example_answers = ["yes", "no", "perhaps"]}}

[model]
kind = "tiny"
width = 64
num_heads = 2
max_tokens = 48
warm_start_games = 64

[rollout]
num_workers = 2
min_workers = 2
group_size = {group_size}
num_groups_in_flight = 4
max_completion_tokens = 4
max_turns = 1
max_tokens = 48

[algorithm]
zero_variance_groups = "keep"

[learner]
num_minibatches = 1

[training]
num_epochs = 2
groups_per_step = 8

[eval]
num_games = 8
num_games_during = 0
"""


def reward_length(completions: list[object], row_id: list[int], file: list[str]) -> list[float]:
    """Append the ids of the scored rows to their file; return the completions' lengths."""
    with open(file[0], "a") as row_file:
        row_file.write(f"{json.dumps(row_id)}\n")
    return [float(len(str(completion))) for completion in completions]


def count_scored_groups(file: Path) -> Counter[int]:
    """Return the number of scored groups of each row."""
    groups = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(len(set(rows)) == 1 and len(rows) == GROUP_SIZE for rows in groups)
    return Counter(rows[0] for rows in groups)


def list_phase_steps(run: Run) -> set[int | None]:
    return {row.num_steps for row in run.rows if row.kind == "phase"}


def test_two_workers_play_each_row_once_per_epoch_across_a_resume(tmp_path: Path) -> None:
    config, scored_rows_file = tmp_path / "run.toml", tmp_path / "scored_rows"
    rows = [
        {"prompt": f"item {row_id}?", "row_id": row_id, "file": str(scored_rows_file)}
        for row_id in range(NUM_ROWS)
    ]
    path = write_rows(rows, tmp_path / "rows.jsonl")
    config.write_text(CONFIG.format(path=json.dumps(str(path)), group_size=GROUP_SIZE))
    with start_run(tmp_path, config=config) as run:
        run.wait_until(lambda: run.last_step >= 3)
        run.stop()
        last_step = run.last_step
    with start_run(tmp_path, config=config, flags=("--resume",)) as run:
        summary = run.finish()
    assert 3 <= last_step < summary.num_steps == 2 * NUM_ROWS // 8
    assert list_phase_steps(run) == {None, summary.num_steps}
    counts = count_scored_groups(scored_rows_file)
    # Groups that were being played at the stop are played again on the same rows.
    assert set(counts) == set(range(NUM_ROWS)) and min(counts.values()) == 2
    assert sum(counts.values()) <= 2 * NUM_ROWS + 16
    assert summary.games_trained == 2 * NUM_ROWS * GROUP_SIZE
