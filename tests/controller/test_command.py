"""Error messages and path resolution of `python -m ludus.trainer`."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from ludus.proto.config import make_run_config
from ludus.trainer.__main__ import main
from ludus.trainer.driver.checks import resolve_config
from ludus.trainer.run.checkpoint import CheckpointFolder, RunState, find_checkpoint


def test_full_disk_gives_a_short_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "demo" / "state"))

    monkeypatch.setattr("ludus.trainer.driver.commands.train", fail)
    config = tmp_path / "run.json"
    config.write_text("{}")
    assert main(["train", "--config", str(config)]) == 1
    path, output = re.escape(str(tmp_path / "demo" / "state")), capsys.readouterr().err
    pattern = rf"error: '{path}' cannot be written: No space left on device; [\d,]+ bytes are free"
    assert re.fullmatch(pattern + " there; make room\n", output)


def test_checkpoint_is_found_by_path_or_name(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000150"
    CheckpointFolder(tmp_path, num_kept=1).save(RunState(step=150), {})
    assert find_checkpoint(Path("step-00000150"), tmp_path) == checkpoint
    assert find_checkpoint(checkpoint, tmp_path / "other") == checkpoint
    unknown_checkpoint = find_checkpoint(Path("step-1"), tmp_path)
    assert unknown_checkpoint == Path("step-1").absolute()


@pytest.mark.parametrize("path", ["./here", "~/here"])
def test_model_folder_becomes_absolute(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model = {"kind": "pretrained", "path": path}
    run = make_run_config({"environment": {"package": "math_env"}, "model": model}, [])
    assert resolve_config(run).model.path == str(tmp_path / "here")
