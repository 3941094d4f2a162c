"""The programs of each image need only packages that the image has."""

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
_WHAT_IT_NEEDS = re.compile(r"image_requirements\.py (.*) > requirements\.txt")
_WITHOUT_THE_REST = """
import importlib, sys
from importlib.machinery import PathFinder

blocked, program, sys.argv[1:] = sys.argv[1].split(","), sys.argv[2], sys.argv[3:]

class WithoutTheRest(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in blocked:  # a package may bring it along: Ray does
            path = [one for one in sys.path if not one.endswith("site-packages")]
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTheRest
module, _, function = program.partition(":")
getattr(importlib.import_module(module), function)()
"""


def list_installed(dockerfile: str, **arguments: str) -> set[str]:
    """Return the canonical names of the distributions in the image."""
    text = (ROOT / dockerfile).read_text(encoding="utf-8")
    for name, value in arguments.items():
        text = text.replace(f"${{{name}}}", value)
    words = _WHAT_IT_NEEDS.findall(text)[0].split()
    excluded = {next_word for word, next_word in pairwise(words) if word == "--without"}
    patterns = [word for word in words if not word.startswith("--") and word not in excluded]
    folders = [folder for pattern in patterns for folder in ROOT.glob(pattern)]
    return set(_with_what_they_require(list_requirements(folders, excluded), set()))


def _with_what_they_require(lines: Sequence[str], visited: set[tuple[str, str]]) -> Iterator[str]:
    for line in lines:
        requirement = Requirement(line)
        for extra in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            try:
                required = importlib.metadata.requires(name) or ()
            except importlib.metadata.PackageNotFoundError:
                continue
            yield name
            yield from _with_what_they_require(
                [text for text in required if _holds(Requirement(text), extra)], visited
            )


def _holds(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def list_missing_modules(installed: set[str]) -> list[str]:
    """Return the importable modules of this machine that the image does not have."""
    repository_modules = {"ludus", *(folder.name for folder in ROOT.glob("envs/*_env"))}
    return [
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if module not in repository_modules
        and not installed & {canonicalize_name(name) for name in distributions}
    ]


GATEWAY = ["ludus.services.cli.app:main", "gateway", "--env", "a=grpc://127.0.0.1:1", "--port=0"]
SERVER = ["ludus.env.__main__:main", "openspiel_env", "--port=0"]
CHECK = ["ludus.trainer.__main__:main", "check", "--config", "examples/blackjack/tiny.toml"]


def command(dockerfile: str, program: Sequence[str], **arguments: str) -> list[str]:
    """Return a command that runs the program with only the packages of the image."""
    blocked = list_missing_modules(list_installed(dockerfile, **arguments))
    assert "pytest" in blocked and "grpc" not in blocked
    return [sys.executable, "-c", _WITHOUT_THE_REST, ",".join(blocked), *program]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dockerfile", "program", "expected"),
    [
        pytest.param("services/Dockerfile", GATEWAY, "all environments", id="gateway"),
        pytest.param("envs/Dockerfile", SERVER, "listening", id="environment"),
    ],
)
def test_the_servers_of_an_image_start(dockerfile: str, program: list[str], expected: str) -> None:
    process = subprocess.Popen(
        command(dockerfile, program, ENVIRONMENT="openspiel_env"),
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
            assert line, output
            output += line
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_trainer_image_checks_a_run(tmp_path: Path) -> None:
    program = [*CHECK, "--set", f"output_dir={tmp_path}"]
    result = subprocess.run(
        command("trainer/Dockerfile", program), capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
