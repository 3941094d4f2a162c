from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.services.cli import run_folder_commands
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow


@pytest.fixture
def demo_folder(ludus: RunCli, use_fake_trainer: Callable[[str], None], tmp_path: Path) -> Path:
    """Return the folder of a finished run."""
    use_fake_trainer("succeeds")
    assert ludus("train", "--set", "training.num_steps=2", "--set", "name=demo").code == 0
    return tmp_path / "runs/demo"


def test_report_prints_the_path_of_the_page(ludus: RunCli, demo_folder: Path) -> None:
    (demo_folder / "report.html").unlink()
    result = ludus("report", "runs/demo")
    assert (result.code, result.out) == (0, "runs/demo/report.html\n")
    assert (demo_folder / "report.html").is_file()


def test_report_writes_and_opens_the_page_at_the_output_path(
    ludus: RunCli, demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_urls: list[str] = []
    monkeypatch.setattr(run_folder_commands.webbrowser, "open", opened_urls.append)
    result = ludus("report", "runs/demo", "--output", "page.html", "--open")
    assert result.code == 0
    assert opened_urls == [(tmp_path / "page.html").as_uri()]


def test_figure_option_writes_a_figure_and_no_page(
    ludus: RunCli, demo_folder: Path, tmp_path: Path
) -> None:
    (demo_folder / "report.html").unlink()
    result = ludus("report", "runs/demo", "--figure", "figure.svg")
    assert result.code == 0
    assert ET.parse(tmp_path / "figure.svg").getroot().tag.endswith("svg")
    assert not (demo_folder / "report.html").exists()


def test_report_of_a_misspelled_run_suggests_existing_runs(
    ludus: RunCli, demo_folder: Path
) -> None:
    result = ludus("report", "runs/dmeo")
    assert result.code == 2
    assert "there is no run 'runs/dmeo'; 'runs' has demo" in result.err


def test_report_of_several_runs_compares_them(
    ludus: RunCli, demo_folder: Path, tmp_path: Path
) -> None:
    assert ludus("train", "--set", "training.num_steps=3", "--set", "name=other").code == 0
    result = ludus("report", "demo", "runs/other")
    assert (result.code, result.out) == (0, "comparison.html\n")
    assert "training.num_steps" in (tmp_path / "comparison.html").read_text()
    result = ludus("report", "demo", "runs/demo", str(demo_folder))
    assert (result.code, result.out) == (0, "runs/demo/report.html\n")
    result = ludus("report", "demo", "other", "--figure", "figure.svg")
    assert result.code == 2 and "--figure shows one run, got 2" in result.err
