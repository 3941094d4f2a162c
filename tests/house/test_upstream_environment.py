"""The builder of virtual environments with somebody else's package."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

DEV = Path(__file__).parents[2] / "dev"


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module, building below a folder of the test's own, without an index to ask."""
    monkeypatch.syspath_prepend(str(DEV))
    import upstream_environment

    monkeypatch.setattr(upstream_environment, "CACHE", tmp_path / "cache")
    return upstream_environment


@pytest.fixture
def builds(upstream, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was built, in place of building it."""
    built: list[list[str]] = []
    begun = threading.Barrier(2, timeout=0.2)

    def build(folder: Path, python: Path, requirements: list[str]) -> None:
        with pytest.raises(threading.BrokenBarrierError):
            begun.wait()  # two builds at once would meet here
        folder.mkdir(exist_ok=True)
        built.append(requirements)

    monkeypatch.setattr(upstream, "_build", build)
    return built


def test_two_that_want_the_same_environment_build_it_once(upstream, builds) -> None:
    found: list[Path] = []
    wanting = [
        threading.Thread(target=lambda: found.append(upstream.python_of("openenv==0.10.0")))
        for _ in range(2)
    ]
    for thread in wanting:
        thread.start()
    for thread in wanting:
        thread.join(timeout=60)
    assert builds == [["openenv==0.10.0"]]
    assert found == [upstream.CACHE / "upstream-openenv-0.10.0" / "bin" / "python"] * 2


def test_an_environment_whose_build_was_cut_off_is_built_again(upstream, builds) -> None:
    (upstream.CACHE / "upstream-openenv-0.10.0").mkdir(parents=True)
    upstream.python_of("openenv==0.10.0")
    upstream.python_of("openenv==0.10.0")
    assert len(builds) == 1


def test_other_packages_beside_it_make_another_environment(upstream, builds) -> None:
    plain = upstream.python_of("openenv==0.10.0")
    assert plain != upstream.python_of("openenv==0.10.0", extra=["open_spiel==2.0.2"])
    assert builds[1] == ["openenv==0.10.0", "open_spiel==2.0.2"]


@pytest.mark.slow
@pytest.mark.parametrize("requirement", ["openenv", "openenv>=0.10", "-e .", "openenv==0.10 --pre"])
def test_a_requirement_without_a_version_is_refused(requirement: str) -> None:
    ended = subprocess.run(
        [sys.executable, DEV / "upstream_environment.py", "--", requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: expected a requirement with its version")
    assert repr(requirement) in ended.stderr
