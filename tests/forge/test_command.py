"""Error messages of `python -m ludus.trainer.compat.forge`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.trainer.compat.forge.__main__ import main

EXAMPLE_PATH = Path(__file__).parents[2] / "examples" / "tutorial" / "blackjack.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["groupsize=3"], "groupsize: unknown, did you mean 'group_size'?"),
        pytest.param(
            ["blackjack_env.server_url=http://localhost:1"],
            "no environment responds at",
            marks=pytest.mark.slow,
        ),
        (["group_size"], "expected section.field=value, got 'group_size'"),
    ],
)
def test_invalid_input_prints_one_message_and_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(EXAMPLE_PATH), *arguments]) == 2
    error_output = capsys.readouterr().err
    assert message in error_output and "Traceback" not in error_output
