"""Advice about existing runs names the options of the interface that started the run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import CHECKPOINTS_FOLDER, CONFIG_FILE, Resume
from ludus.trainer.__main__ import run_command
from ludus.trainer.run.checkpoint import RunState
from ludus.trainer.run.lifecycle import open_run


@pytest.fixture
def run(tmp_path: Path) -> LanguageModelRun:
    """Return a run whose folder contains a run with a checkpoint."""
    run = LanguageModelRun(name="demo", output_dir=str(tmp_path))
    (run.folder / CHECKPOINTS_FOLDER / "step-00000001").mkdir(parents=True)
    (run.folder / CONFIG_FILE).touch()
    return run


def start(run: LanguageModelRun) -> None:
    with open_run(run, RunState, 1, resume=Resume.NEVER, overwrite=False):
        raise AssertionError("the run started")


def test_python_gets_the_arguments_of_the_trainer(run: LanguageModelRun) -> None:
    message = "continue it with resume='always', replace it with overwrite=True, or use another"
    with pytest.raises(ConfigError, match=message):
        start(run)


def test_command_line_gets_its_options(
    run: LanguageModelRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda args: start(run), Namespace()) == 2
    assert "continue it with --resume, replace it with --overwrite" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="resume='always'"):
        start(run)
