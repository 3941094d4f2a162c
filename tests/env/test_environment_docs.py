"""The examples in `docs/environments.md` work without changes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.env.check import check_environment
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.errors import IllegalActionError, ToolError

PAGE_TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
LUDUS_COMMAND = (
    f"{shlex.quote(sys.executable)} -c 'from ludus.services.cli.app import main; main()'"
)


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE_TEXT, re.DOTALL)


def load_examples() -> dict:
    """Run the page's two environment examples and return their namespace."""
    namespace: dict = {"__name__": "guessing"}
    for example in find_blocks("python")[:2]:
        exec(example, namespace)
    return namespace


@pytest.mark.slow
def test_example_environments_pass_every_check():
    for name in ("GuessEnvironment", "GuessWithTool"):
        check_environment(load_examples()[name]).raise_if_failed()


def test_example_environment_refuses_illegal_actions_and_steps_after_the_end():
    namespace = load_examples()
    environment, make_guess = namespace["GuessEnvironment"](), namespace["Guess"]
    environment.reset(seed=7)
    for number in (0, 10):
        with pytest.raises(IllegalActionError, match="expected a number from 1 to 9"):
            environment.step(make_guess(number=number))
    assert environment.state.step_count == 0
    number = 1
    while not environment.step(make_guess(number=number)).terminated:
        number += 1
    for late_number in (0, number):
        with pytest.raises(ValueError, match="the episode is over"):
            environment.step(make_guess(number=late_number))


def test_example_tool_refuses_invalid_arguments():
    environment = load_examples()["GuessWithTool"]()
    environment.reset(seed=7)
    assert environment.call_tool("divides", {"by": 1}) == {"divides": True}
    for arguments in ({}, {"by": 0}, {"by": "two"}):
        with pytest.raises(ToolError, match="expected a whole number"):
            environment.call_tool("divides", arguments)
    with pytest.raises(ToolError, match="its tools are: divides"):
        environment.call_tool("divide", {"by": 2})


@pytest.mark.slow
def test_python_examples_play_over_every_wire(tmp_path, monkeypatch, capsys):
    environment_code, tool_code, *other_blocks = find_blocks("python")
    client_examples = [block for block in other_blocks if "from_docker_image" not in block]
    assert len(client_examples) == 2
    (tmp_path / "guessing.py").write_text(environment_code + tool_code)
    monkeypatch.chdir(tmp_path)
    server = LocalServer("guessing:GuessWithTool", {})
    try:
        addresses = server.start()
        for address in (addresses.http, addresses.grpc):
            for client_example in client_examples:
                exec(client_example.replace("http://127.0.0.1:8000", address), {})
            tool_line, step_line, mean_return = capsys.readouterr().out.splitlines()
            assert tool_line.startswith("{'divides': ")
            assert "'word': " in step_line
            assert float(mean_return) == 1.0, "an example did not guess the number in every episode"
    finally:
        server.stop()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_documented_command_except_serve_works(tmp_path):
    commands = [line for block in find_blocks("bash") for line in block.splitlines()]
    assert len(commands) > 10
    script = "set -e\n" + "\n".join(
        command.replace("ludus env", f"{LUDUS_COMMAND} env")
        + (" < /dev/null" if "|" not in command else "")
        for command in commands
        if "env serve" not in command
    )
    process = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr
