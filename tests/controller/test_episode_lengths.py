"""Tests of the warning about limits that are shorter than an environment's episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.config import load_run_config
from ludus.trainer.setup.episode_lengths import warn_of_short_limits
from openspiel_env.server.openspiel_environment import OpenSpielEnvironment

EXAMPLES = Path(__file__).parents[2] / "examples"


def read_warnings(capsys: pytest.CaptureFixture[str], example: str, *overrides: str) -> str:
    run = load_run_config(EXAMPLES / example, overrides)
    warn_of_short_limits(run)
    return capsys.readouterr().err


def test_a_limit_below_most_episodes_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    warning = read_warnings(capsys, "tic_tac_toe/tiny.toml", "rollout.max_turns=2")
    assert "20 of 20 episodes with random actions need more than 2 turns" in warning
    assert "raise environment.max_turns" in warning


@pytest.mark.parametrize("override", ["rollout.max_turns=5", "environment.max_turns=5"])
def test_a_sufficient_limit_is_not(capsys: pytest.CaptureFixture[str], override: str) -> None:
    assert read_warnings(capsys, "tic_tac_toe/tiny.toml", override) == ""


def test_an_environment_that_fails_does_not_end_the_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no game today")

    monkeypatch.setattr(OpenSpielEnvironment, "reset", fail)
    assert read_warnings(capsys, "tic_tac_toe/tiny.toml", "rollout.max_turns=1") == ""
