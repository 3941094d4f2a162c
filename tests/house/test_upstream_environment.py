"""The builder of virtual environments with third-party packages."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

DEV_FOLDER = Path(__file__).parents[2] / "dev"


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Import dev/upstream_environment.py, and set its cache to a temporary folder."""
    monkeypatch.syspath_prepend(str(DEV_FOLDER))
    import upstream_environment

    monkeypatch.setattr(upstream_environment, "CACHE", tmp_path / "cache")
    return upstream_environment


@pytest.fixture
def builds(upstream, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the build function with a fake, and return the requirements of each build."""
    requirement_lists: list[list[str]] = []
    barrier = threading.Barrier(2, timeout=0.2)

    def record_build(folder: Path, python: Path, requirements: list[str]) -> None:
        with pytest.raises(threading.BrokenBarrierError):
            barrier.wait()  # does not break if two builds run simultaneously
        folder.mkdir(exist_ok=True)
        requirement_lists.append(requirements)

    monkeypatch.setattr(upstream, "_build_environment", record_build)
    return requirement_lists


def test_two_threads_build_the_same_environment_once(upstream, builds) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(upstream.install_upstream("openenv==0.10.0")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert builds == [["openenv==0.10.0"]]
    assert paths == [upstream.CACHE / "upstream-openenv-0.10.0" / "bin" / "python"] * 2


def test_incomplete_environment_is_rebuilt(upstream, builds) -> None:
    (upstream.CACHE / "upstream-openenv-0.10.0").mkdir(parents=True)
    upstream.install_upstream("openenv==0.10.0")
    upstream.install_upstream("openenv==0.10.0")
    assert len(builds) == 1


def test_extra_packages_make_a_separate_environment(upstream, builds) -> None:
    path = upstream.install_upstream("openenv==0.10.0")
    assert path != upstream.install_upstream("openenv==0.10.0", extra=["open_spiel==2.0.2"])
    assert builds[1] == ["openenv==0.10.0", "open_spiel==2.0.2"]


@pytest.mark.slow
@pytest.mark.parametrize("requirement", ["openenv", "openenv>=0.10", "-e .", "openenv==0.10 --pre"])
def test_requirement_without_a_version_is_refused(requirement: str) -> None:
    process = subprocess.run(
        [sys.executable, DEV_FOLDER / "upstream_environment.py", "--", requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error: a requirement must have a version")
    assert repr(requirement) in process.stderr
