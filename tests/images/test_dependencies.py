"""What each image runs needs no package that the image does not have."""

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


def installed_by(dockerfile: str, **arguments: str) -> set[str]:
    """Distributions that the image gets, by their canonical names."""
    text = (ROOT / dockerfile).read_text(encoding="utf-8")
    for name, value in arguments.items():
        text = text.replace(f"${{{name}}}", value)
    words = _WHAT_IT_NEEDS.findall(text)[0].split()
    without = {after for word, after in pairwise(words) if word == "--without"}
    patterns = [word for word in words if not word.startswith("--") and word not in without]
    folders = [folder for pattern in patterns for folder in ROOT.glob(pattern)]
    return set(_with_what_they_require(list_requirements(folders, without), set()))


def _with_what_they_require(lines: Sequence[str], seen: set[tuple[str, str]]) -> Iterator[str]:
    for line in lines:
        wanted = Requirement(line)
        for extra in ("", *wanted.extras):
            name = canonicalize_name(wanted.name)
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                required = importlib.metadata.requires(name) or ()
            except importlib.metadata.PackageNotFoundError:
                continue
            yield name
            yield from _with_what_they_require(
                [one for one in required if _holds(Requirement(one), extra)], seen
            )


def _holds(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def others(installed: set[str]) -> list[str]:
    """Modules that can be imported here and come with no distribution of the image."""
    ours = {"ludus", *(folder.name for folder in ROOT.glob("envs/*_env"))}
    return [
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if module not in ours and not installed & {canonicalize_name(one) for one in distributions}
    ]


GATEWAY = ["ludus.services.cli.app:main", "gateway", "--env", "a=grpc://127.0.0.1:1", "--port=0"]
SERVER = ["ludus.env.__main__:main", "openspiel_env", "--port=0"]
CHECK = ["ludus.trainer.__main__:main", "check", "--config", "examples/blackjack/tiny.toml"]


def command(dockerfile: str, program: Sequence[str], **arguments: str) -> list[str]:
    """The program, run with the packages of the image alone."""
    blocked = others(installed_by(dockerfile, **arguments))
    assert "pytest" in blocked and "grpc" not in blocked
    return [sys.executable, "-c", _WITHOUT_THE_REST, ",".join(blocked), *program]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dockerfile", "program", "says"),
    [
        pytest.param("services/Dockerfile", GATEWAY, "all environments", id="gateway"),
        pytest.param("envs/Dockerfile", SERVER, "listening", id="environment"),
    ],
)
def test_what_an_image_serves_starts(dockerfile: str, program: list[str], says: str) -> None:
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
        said = ""
        while says not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_trainers_image_looks_at_a_run(tmp_path: Path) -> None:
    program = [*CHECK, "--set", f"output_dir={tmp_path}"]
    checked = subprocess.run(
        command("trainer/Dockerfile", program), capture_output=True, text=True, cwd=ROOT
    )
    assert checked.returncode == 0, checked.stderr
