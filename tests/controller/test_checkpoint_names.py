"""What is said of a checkpoint that is not there, or that nothing can go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import CheckpointError
from ludus.proto.runs import CHECKPOINTS_FOLDER
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.run import checkpoint
from ludus.trainer.run.checkpoint import CheckpointFolder, RunState, check_streams, read_state


def test_a_checkpoint_that_is_not_there_is_told_from_one_that_is_damaged(tmp_path: Path) -> None:
    damaged = tmp_path / "step-00000001"
    damaged.mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint '.*step-00000002'") as missing:
        read_state(tmp_path / "step-00000002", RunState)
    assert str(damaged) in str(missing.value), "those that are there are named"
    assert "--overwrite" not in str(missing.value)
    with pytest.raises(CheckpointError, match=r"cannot be read.*--overwrite"):
        read_state(damaged, RunState)


async def test_a_run_does_not_go_on_with_other_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LanguageModelRun(output_dir=str(tmp_path))
    checkpoints = CheckpointFolder(tmp_path / run.name / CHECKPOINTS_FOLDER, keep=1)
    with checkpoints.prepare(5) as aside:
        saved = await checkpoints.commit(aside, RunState(step=5), [])
    before = sorted(path for path in tmp_path.rglob("*"))
    monkeypatch.setattr(checkpoint, "STREAMS_VERSION", 2)
    with pytest.raises(CheckpointError, match="streams of version 2, got 1; continue with"):
        async with Trainer(run, resume="always"):
            raise AssertionError("it went on")
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert read_state(saved, RunState).step == 5, "it can be judged all the same"


def test_a_checkpoint_that_says_nothing_of_its_random_numbers_is_older_than_they_are() -> None:
    path = Path("step-00000005")
    check_streams(path, RunState.model_validate_json(RunState().model_dump_json()))
    with pytest.raises(CheckpointError, match=r"got 0; .* --overwrite or under another name"):
        check_streams(path, RunState.model_validate_json('{"step": 5}'))
