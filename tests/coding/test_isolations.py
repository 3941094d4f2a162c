"""Servers of coding_env with every isolation and installation, started from an empty folder."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from coding_env import CodeAction, CodingEnv
from coding_env.problems import write_solution
from tests.coding.installations import install

pytestmark = pytest.mark.slow


@contextmanager
def serve_from_empty_folder(python: Path, folder: Path, *arguments: str) -> Iterator[str]:
    """Serve coding_env without this process's search path, and yield the HTTP address."""
    ready_file = folder / "ready.json"
    empty_folder = folder / "empty"
    empty_folder.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-m", "ludus.env", "coding_env", "--port", "0", *arguments]
    process = subprocess.Popen(
        [*command, "--no-determinism-check", "--ready-file", str(ready_file)],
        cwd=empty_folder,
        env=variables,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + 120
        while not ready_file.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_s, "the server is not ready"
            time.sleep(0.02)
        yield orjson.loads(ready_file.read_bytes())["http"]
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.parametrize(
    ("layout", "isolation"),
    [
        ("editable", "inline"),
        ("editable", "pool"),
        ("editable", "process"),
        ("wheel", "process"),
        ("image", "process"),
    ],
)
def test_programs_run_from_any_folder(layout: str, isolation: str, tmp_path: Path) -> None:
    python = install(layout, tmp_path)
    with (
        serve_from_empty_folder(python, tmp_path, "--isolation", isolation) as address,
        CodingEnv(base_url=address) as env,
    ):
        observation = env.reset(seed=1).observation
        code = write_solution(observation.problem, observation.parameters)
        result = env.step(CodeAction(code=code))
        assert (result.reward, result.observation.stderr) == (1.0, "")
