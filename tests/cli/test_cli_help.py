from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow

COMMANDS = [
    ("init",),
    ("train",),
    ("train-reward",),
    ("sft",),
    ("eval",),
    ("export",),
    ("chat",),
    ("report",),
    ("scale",),
    ("model", "get"),
    ("model", "convert"),
    ("env", "serve"),
    ("env", "list"),
    ("env", "check"),
    ("env", "bench"),
    ("env", "init"),
    ("env", "play"),
    ("env", "replay"),
]
HEAVY_PACKAGES = ("torch", "ray", "vllm", "transformers", "pyspiel", "numpy", "grpc")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command_shows_an_example(ludus: RunCli, command: tuple[str, ...]) -> None:
    result = ludus(*command, "--help")
    assert result.code == 0
    assert f"Example: ludus {' '.join(command)}" in result.out


def test_help_lists_every_command(ludus: RunCli) -> None:
    result = ludus("--help")
    assert result.code == 0
    assert all(name in result.out for name in ("train", "eval", "report", "env"))


@pytest.mark.parametrize(
    "arguments", [("trian",), ("train", "--sett", "a=b"), ("env", "bench", "x_env", "--games", "0")]
)
def test_a_usage_error_exits_with_2_and_no_traceback(
    ludus: RunCli, arguments: tuple[str, ...]
) -> None:
    result = ludus(*arguments)
    assert result.code == 2
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    "statement",
    [
        "import ludus.services.cli.app",
        "import sys; sys.argv = ['ludus', '--help']\n"
        "from ludus.services.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass",
        "import sys; sys.argv = ['ludus', 'train', '--dry-run']\n"
        "from ludus.services.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass",
    ],
    ids=["import", "help", "dry-run"],
)
def test_command_line_imports_no_heavy_package(statement: str) -> None:
    program = f"{statement}\nimport sys\nsys.stderr.write(' '.join(sys.modules))"
    loaded_modules = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stderr.split()
    assert "ludus.services.cli.app" in loaded_modules
    assert not [name for name in HEAVY_PACKAGES if name in loaded_modules]
