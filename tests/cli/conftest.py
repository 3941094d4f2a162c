"""Fixtures that run `ludus` commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.services.cli import app, trainer_process
from tests.cli.commands import FAKE_TRAINER, Outcome, RunCli


@pytest.fixture
def ludus(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> RunCli:
    """Runs `ludus ARGUMENTS` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["ludus", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            app.main()
        out, err = capfd.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture
def fake_trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts the fake trainer in place of the real one, in the scenario that is given."""

    def use(scenario: str) -> None:
        command = [sys.executable, str(FAKE_TRAINER), scenario]
        monkeypatch.setattr(
            trainer_process, "trainer_command", lambda arguments: [*command, *arguments]
        )

    return use
