"""Error messages about checkpoints that are missing or cannot be resumed from."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import CheckpointError
from ludus.proto.runs import CHECKPOINTS_FOLDER
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.run import checkpoint
from ludus.trainer.run.checkpoint import CheckpointFolder, RunState, check_streams, read_state


def test_missing_and_damaged_checkpoints_have_different_messages(tmp_path: Path) -> None:
    damaged_checkpoint = tmp_path / "step-00000001"
    damaged_checkpoint.mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint '.*step-00000002'") as error_info:
        read_state(tmp_path / "step-00000002", RunState)
    assert str(damaged_checkpoint) in str(error_info.value), "the existing checkpoint is not named"
    assert "overwrite" not in str(error_info.value)
    with pytest.raises(CheckpointError, match=r"cannot be read.*overwrite=True"):
        read_state(damaged_checkpoint, RunState)


async def test_resume_with_different_random_streams_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LanguageModelRun(output_dir=str(tmp_path))
    checkpoints = CheckpointFolder(tmp_path / run.name / CHECKPOINTS_FOLDER, num_kept=1)
    with checkpoints.prepare(5) as folder:
        saved_checkpoint = await checkpoints.commit(folder, RunState(step=5), [])
    previous_paths = sorted(path for path in tmp_path.rglob("*"))
    monkeypatch.setattr(checkpoint, "STREAMS_VERSION", 2)
    with pytest.raises(
        CheckpointError, match="streams of version 1, but this Ludus uses version 2; continue with"
    ):
        async with Trainer(run, resume="always"):
            raise AssertionError("the run resumed")
    assert sorted(path for path in tmp_path.rglob("*")) == previous_paths
    assert read_state(saved_checkpoint, RunState).step == 5, "the state cannot be read"


def test_checkpoint_without_stream_version_is_refused() -> None:
    path = Path("step-00000005")
    check_streams(path, RunState.model_validate_json(RunState().model_dump_json()))
    with pytest.raises(CheckpointError, match=r"of version 0, .* overwrite=True or under"):
        check_streams(path, RunState.model_validate_json('{"step": 5}'))
