"""`python -m ludus.trainer.compat.forge`, in place of `python -m apps.grpo.main`: its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.trainer.compat.forge.__main__ import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "tutorial" / "blackjack.yaml"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["groupsize=3"], "groupsize: unknown, did you mean 'group_size'?"),
        (["blackjack_env.server_url=http://localhost:1"], "no environment responds at"),
        (["group_size"], "expected section.field=value, got 'group_size'"),
    ],
)
def test_bad_input_ends_with_one_message_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(EXAMPLE), *arguments]) == 2
    printed = capsys.readouterr().err
    assert told in printed and "Traceback" not in printed
