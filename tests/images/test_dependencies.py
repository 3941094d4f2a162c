"""Programs of the images, run with only the packages that their image contains."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from image_requirements import list_requirements
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
_REQUIREMENTS_PATTERN = re.compile(r"image_requirements\.py (.*) > requirements\.txt")
_RESTRICTED_PROGRAM = """
import importlib, sys
from importlib.machinery import PathFinder

blocked_modules, program, sys.argv[1:] = sys.argv[1].split(","), sys.argv[2], sys.argv[3:]

class RestrictedPathFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in blocked_modules:  # another package may bundle the module, as Ray does
            path = [folder for folder in sys.path if not folder.endswith("site-packages")]
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = RestrictedPathFinder
module, _, function = program.partition(":")
getattr(importlib.import_module(module), function)()
"""


def list_installed_packages(dockerfile: str, **arguments: str) -> set[str]:
    """Return the canonical names of the distributions in the image."""
    text = (ROOT / dockerfile).read_text(encoding="utf-8")
    for name, value in arguments.items():
        text = text.replace(f"${{{name}}}", value)
    words = _REQUIREMENTS_PATTERN.findall(text)[0].split()
    excluded_names = {next_word for word, next_word in pairwise(words) if word == "--without"}
    patterns = [word for word in words if not word.startswith("--") and word not in excluded_names]
    folders = [folder for pattern in patterns for folder in ROOT.glob(pattern)]
    return set(_list_dependencies(list_requirements(folders, excluded_names), set()))


def _list_dependencies(lines: Sequence[str], visited: set[tuple[str, str]]) -> Iterator[str]:
    for line in lines:
        requirement = Requirement(line)
        for extra in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            try:
                dependencies = importlib.metadata.requires(name) or ()
            except importlib.metadata.PackageNotFoundError:
                continue
            yield name
            yield from _list_dependencies(
                [text for text in dependencies if _is_required(Requirement(text), extra)], visited
            )


def _is_required(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def list_missing_modules(installed_packages: set[str]) -> list[str]:
    """Return the importable modules of this machine that the image does not have."""
    repository_modules = {"ludus", *(folder.name for folder in ROOT.glob("envs/*_env"))}
    return [
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if module not in repository_modules
        and not installed_packages & {canonicalize_name(name) for name in distributions}
    ]


GATEWAY_PROGRAM = [
    "ludus.services.cli.app:main",
    "gateway",
    "--env",
    "a=grpc://127.0.0.1:1",
    "--port=0",
]
SERVER_PROGRAM = ["ludus.env.__main__:main", "openspiel_env", "--port=0"]
CHECK_PROGRAM = ["ludus.trainer.__main__:main", "check", "--config", "examples/blackjack/tiny.toml"]


def make_command(dockerfile: str, program: Sequence[str], **arguments: str) -> list[str]:
    """Return a command that runs the program with only the packages of the image."""
    missing_modules = list_missing_modules(list_installed_packages(dockerfile, **arguments))
    assert "pytest" in missing_modules and "grpc" not in missing_modules
    return [sys.executable, "-c", _RESTRICTED_PROGRAM, ",".join(missing_modules), *program]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dockerfile", "program", "expected"),
    [
        pytest.param("services/Dockerfile", GATEWAY_PROGRAM, "all environments", id="gateway"),
        pytest.param("envs/Dockerfile", SERVER_PROGRAM, "listening", id="environment"),
    ],
)
def test_image_servers_start(dockerfile: str, program: list[str], expected: str) -> None:
    process = subprocess.Popen(
        make_command(dockerfile, program, ENVIRONMENT="openspiel_env"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"LUDUS_SESSION_KEY": "0" * 64},
    )
    try:
        assert process.stdout is not None
        output = ""
        while expected not in output:
            line = process.stdout.readline()
            assert line, f"program exited during its start: {output}"
            output += line
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_trainer_image_can_check_a_run(tmp_path: Path) -> None:
    program = [*CHECK_PROGRAM, "--set", f"output_dir={tmp_path}"]
    result = subprocess.run(
        make_command("trainer/Dockerfile", program), capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
