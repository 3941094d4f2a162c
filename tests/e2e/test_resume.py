"""A run that resumes, or branches, after its first step ends with the weights of a whole run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ludus.proto.runs import MetricsRow
from tests.e2e.runs import Run, start_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("shared_ray"),
]

EXACT_SETTINGS = (
    "training.max_staleness=0",
    "training.groups_per_step=16",
    "training.checkpoint_every_steps=1",
    "eval.num_games_during=0",
    "eval.num_games=50",
    "model.warm_start_games=256",
    "learner.learning_rate=0.003",
    "learner.schedule=constant",
    "algorithm.entropy_coef_final=null",
    "algorithm.kl_coef_final=null",
    "algorithm.correction.kind=off",
    "algorithm.geometric_mask=null",
)
"""Settings for on-policy training, whose data do not depend on timing. The sampler's batches depend
on timing and change the last bit of its log-probs, so the loss does not use these log-probs."""
TIMING_SUFFIXES = ("_s", "_per_second", "mfu", "mismatch_kl", "canary_error")


def load_weights(run: Run, step: int) -> dict[str, torch.Tensor]:
    """Return the weights of the policy in a checkpoint."""
    return load_file(run.folder / "checkpoints" / f"step-{step:08d}" / "model/model.safetensors")


def list_training_rows(run: Run) -> list[tuple[str, int, str | None, dict[str, float]]]:
    """Return the training and environment rows, without values that depend on timing."""
    return [
        (
            row.kind,
            row.step,
            row.environment,
            {
                name: value
                for name, value in row.values.items()
                if not name.endswith(TIMING_SUFFIXES)
            },
        )
        for row in run.rows
        if row.kind in ("train", "environment")
    ]


def list_evaluation_rows(run: Run) -> list[MetricsRow]:
    """Return the evaluation rows, with their elapsed time set to 0."""
    rows = [row for row in run.rows if row.kind == "eval"]
    return [row.model_copy(update={"elapsed_s": 0.0}) for row in rows]


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param("learner.num_ranks=1", id="1", marks=pytest.mark.long),
        pytest.param("learner.num_ranks=2", id="2", marks=pytest.mark.long),
        pytest.param("rollout.constrain=legal_answers", id="answers", marks=pytest.mark.long),
    ],
)
def test_resumed_run_equals_an_uninterrupted_run(tmp_path: Path, setting: str) -> None:
    settings = (*EXACT_SETTINGS, setting, "training.num_steps=2")
    with start_run(tmp_path / "whole", *settings) as full_run:
        full_run.finish()
    # Copy the run without its second checkpoint, so that the copy resumes after the first step.
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "run" / "checkpoints" / "step-00000002")
    with start_run(tmp_path / "parts", *settings, flags=("--resume",)) as resumed_run:
        first_weights = load_weights(resumed_run, 1)
        resumed_run.finish()

    full_weights, resumed_weights = load_weights(full_run, 2), load_weights(resumed_run, 2)
    assert full_weights.keys() == resumed_weights.keys()
    assert any(
        not torch.equal(first_weights[name], resumed_weights[name]) for name in first_weights
    ), "the second step did not change the weights"
    largest_difference = max(
        float((full_weights[name] - resumed_weights[name]).abs().max()) for name in full_weights
    )
    assert largest_difference == 0.0
    assert list_training_rows(full_run) == list_training_rows(resumed_run)
    assert list_evaluation_rows(full_run)[-1] == list_evaluation_rows(resumed_run)[-1]


@pytest.mark.long
def test_a_branch_equals_the_whole_run_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    settings = (*EXACT_SETTINGS, "training.num_steps=2")
    with start_run(tmp_path, *settings) as full_run:
        full_run.finish()
    names = {path: path.stat().st_mtime_ns for path in full_run.folder.rglob("*")}
    ludus = str(Path(sys.executable).parent / "ludus")
    output = subprocess.run(
        [ludus, "train", "--from", f"{full_run.folder}@1", "--set", "name=branch"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert output.returncode == 0, output.stderr
    assert names == {path: path.stat().st_mtime_ns for path in full_run.folder.rglob("*")}
    branch = replace(full_run, folder=tmp_path / "branch")
    full_weights, branch_weights = load_weights(full_run, 2), load_weights(branch, 2)
    assert all(torch.equal(full_weights[name], branch_weights[name]) for name in full_weights)
    assert list_training_rows(branch) == list_training_rows(full_run)
