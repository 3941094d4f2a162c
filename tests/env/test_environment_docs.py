"""What `docs/environments.md` shows works as it stands there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.env.check import check_environment

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
LUDUS = f"{shlex.quote(sys.executable)} -c 'from ludus.services.cli.app import main; main()'"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_keeps_the_contract():
    (example,) = blocks("python")
    names: dict = {}
    exec(example, names)
    check_environment(names["GuessEnvironment"]).raise_if_failed()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_that_ends_by_itself_works(tmp_path):
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(commands) > 10
    script = "set -e\n" + "\n".join(
        command.replace("ludus env", f"{LUDUS} env")
        + (" < /dev/null" if "|" not in command else "")
        for command in commands
        if "env serve" not in command
    )
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
