"""What is said of a checkpoint that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.errors import CheckpointError
from ludus.trainer.checkpoint import read_state


def test_a_checkpoint_that_is_not_there_is_told_from_one_that_is_damaged(tmp_path: Path) -> None:
    damaged = tmp_path / "step-00000001"
    damaged.mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint '.*step-00000002'") as missing:
        read_state(tmp_path / "step-00000002")
    assert str(damaged) in str(missing.value), "those that are there are named"
    assert "--overwrite" not in str(missing.value)
    with pytest.raises(CheckpointError, match=r"cannot be read.*--overwrite"):
        read_state(damaged)
