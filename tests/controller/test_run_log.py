"""The log of a run has one line for each record."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ludus.proto.runs import LOG_FILE
from ludus.trainer.core.output import warn_user
from ludus.trainer.run.lifecycle import log_to_folder

HOSTILE_TEXT = "no card \x1b]0;t\x07\u202e\nwarning: forged"


def test_hidden_characters_are_escaped_in_the_log_and_in_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_to_folder(tmp_path, "info"):
        logging.getLogger("ludus").warning("%s", HOSTILE_TEXT)
        warn_user(HOSTILE_TEXT)
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert len(lines) == 2
    assert all(line.endswith(r"no card \x1b]0;t\x07\u202e\nwarning: forged") for line in lines)
    expected_output = "warning: no card \\x1b]0;t\\x07\\u202e\n  warning: forged\n"
    assert capsys.readouterr().err.endswith(expected_output)
