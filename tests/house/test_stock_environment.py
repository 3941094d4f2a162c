"""The builder of virtual environments with somebody else's package."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

DEV = Path(__file__).parents[2] / "dev"


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module, building below a folder of the test's own, without an index to ask."""
    monkeypatch.syspath_prepend(str(DEV))
    import stock_environment

    monkeypatch.setattr(stock_environment, "CACHE", tmp_path / "cache")
    return stock_environment


@pytest.fixture
def builds(stock, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was built, in place of building it."""
    built: list[list[str]] = []
    begun = threading.Barrier(2, timeout=1)

    def build(folder: Path, python: Path, requirements: list[str]) -> None:
        with pytest.raises(threading.BrokenBarrierError):
            begun.wait()  # two builds at once would meet here
        folder.mkdir(exist_ok=True)
        built.append(requirements)

    monkeypatch.setattr(stock, "_build", build)
    return built


def test_two_that_want_the_same_environment_build_it_once(stock, builds) -> None:
    found: list[Path] = []
    wanting = [
        threading.Thread(target=lambda: found.append(stock.python_of("openenv==0.10.0")))
        for _ in range(2)
    ]
    for thread in wanting:
        thread.start()
    for thread in wanting:
        thread.join(timeout=30)
    assert builds == [["openenv==0.10.0"]]
    assert found == [stock.CACHE / "stock-openenv-0.10.0" / "bin" / "python"] * 2


def test_an_environment_whose_build_was_cut_off_is_built_again(stock, builds) -> None:
    (stock.CACHE / "stock-openenv-0.10.0").mkdir(parents=True)
    stock.python_of("openenv==0.10.0")
    stock.python_of("openenv==0.10.0")
    assert len(builds) == 1


def test_other_packages_beside_it_make_another_environment(stock, builds) -> None:
    plain = stock.python_of("openenv==0.10.0")
    assert plain != stock.python_of("openenv==0.10.0", extra=["open_spiel==2.0.2"])
    assert builds[1] == ["openenv==0.10.0", "open_spiel==2.0.2"]


@pytest.mark.parametrize("requirement", ["openenv", "openenv>=0.10", "-e .", "openenv==0.10 --pre"])
def test_a_requirement_without_a_version_is_refused(requirement: str) -> None:
    ended = subprocess.run(
        [sys.executable, DEV / "stock_environment.py", "--", requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: expected a requirement with its version")
    assert repr(requirement) in ended.stderr
