from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.proto.run_lock import RunLock
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow


@pytest.fixture
def runs_folder(ludus: RunCli, use_fake_trainer: Callable[[str], None], tmp_path: Path) -> Path:
    """Return a folder with the finished runs "early" and "late"."""
    use_fake_trainer("succeeds")
    for name in ("early", "late"):
        assert ludus("train", "--set", "training.num_steps=3", "--set", f"name={name}").code == 0
    return tmp_path / "runs"


def read_listed_runs(ludus: RunCli, *options: str) -> dict[str, dict[str, object]]:
    result = ludus("runs", "--json", *options)
    assert result.code == 0
    return {run["name"]: run for run in map(json.loads, result.out.splitlines())}


def test_runs_are_listed_from_the_latest_to_the_first(ludus: RunCli, runs_folder: Path) -> None:
    (runs_folder / "notes").mkdir()
    (runs_folder / "table.csv").write_text("a,b\n")
    result = ludus("runs")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines() if "finished" in line]
    assert [line[0] for line in lines] == ["late", "early"]
    assert all("3/3" in line and "wins" in line for line in lines)


def test_a_listed_run_has_its_environment_model_and_result(
    ludus: RunCli, runs_folder: Path
) -> None:
    run = read_listed_runs(ludus)["late"]
    summary = json.loads((runs_folder / "late/summary.json").read_bytes())
    assert (run["step"], run["num_steps"], run["status"]) == (3, 3, "finished")
    assert run["model"] == "tiny, width 128"
    assert run["environments"] == list(summary["results"])
    assert run["result"] == {
        "metric": "wins",
        "value": summary["win_rate"],
        "ci95": summary["win_rate_ci95"],
    }
    assert run["num_bytes"] == sum(
        path.stat().st_size for path in (runs_folder / "late").rglob("*") if path.is_file()
    )


def test_a_run_without_summary_shows_its_latest_evaluation(
    ludus: RunCli, runs_folder: Path
) -> None:
    (runs_folder / "late/summary.json").unlink()
    rows = [json.loads(line) for line in (runs_folder / "late/metrics.jsonl").open()]
    win_rate = [row["values"]["win_rate"] for row in rows if row["kind"] == "eval"][-1]
    run = read_listed_runs(ludus)["late"]
    assert run["status"] == "stopped"
    assert run["result"]["value"] == win_rate  # type: ignore[index]


def test_a_training_run_is_running_and_cannot_be_deleted(ludus: RunCli, runs_folder: Path) -> None:
    lock = RunLock.take(runs_folder / "late")
    try:
        assert read_listed_runs(ludus)["late"]["status"] == "running"
        result = ludus("runs", "rm", "late", "--yes")
    finally:
        lock.release()
    assert result.code == 2
    assert "run 'late' is training" in result.err
    assert (runs_folder / "late/metrics.jsonl").exists()


@pytest.mark.parametrize("text", ["", "{", '{"kind": "language_model", "model": 3}'])
def test_a_run_with_an_unreadable_configuration_is_listed(
    ludus: RunCli, runs_folder: Path, text: str
) -> None:
    (runs_folder / "late/config.json").write_text(text)
    run = read_listed_runs(ludus)["late"]
    assert (run["model"], run["environments"], run["step"]) == (None, None, 3)
    assert ludus("runs").code == 0


def test_an_empty_folder_has_no_runs(ludus: RunCli) -> None:
    result = ludus("runs", "--folder", "elsewhere")
    assert (result.code, result.out) == (0, "")
    assert "no runs in 'elsewhere'" in result.err


def test_rm_deletes_only_the_named_runs(ludus: RunCli, runs_folder: Path) -> None:
    result = ludus("runs", "rm", "early", "--yes")
    assert (result.code, result.out) == (0, "deleted runs/early\n")
    assert [path.name for path in runs_folder.iterdir()] == ["late"]


def test_rm_asks_in_a_terminal(
    ludus: RunCli, runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", refuse)
    assert ludus("runs", "rm", "early").code == 1
    assert (runs_folder / "early/metrics.jsonl").exists()


def refuse(text: str, **_: object) -> None:
    import typer

    assert "runs/early" in text
    raise typer.Abort


def test_rm_without_a_terminal_needs_a_confirmation(ludus: RunCli, runs_folder: Path) -> None:
    result = ludus("runs", "rm", "early", "late")
    assert result.code == 2
    assert "would delete 'runs/early', 'runs/late'" in result.err
    assert "add --yes" in result.err
    assert len(list(runs_folder.iterdir())) == 2


@pytest.mark.parametrize("name", ["lat", "notes", "../runs/late", "", ".", "early/checkpoints"])
def test_rm_refuses_what_is_no_run(ludus: RunCli, runs_folder: Path, name: str) -> None:
    (runs_folder / "notes").mkdir()
    result = ludus("runs", "rm", "early", name, "--yes")
    assert result.code == 2
    assert f"there is no run '{name}'; 'runs' has " in result.err
    assert "late" in result.err
    assert (runs_folder / "early/metrics.jsonl").exists()
    assert (runs_folder / "late/metrics.jsonl").exists()


def test_rm_does_not_follow_links(ludus: RunCli, runs_folder: Path, tmp_path: Path) -> None:
    (runs_folder / "late").rename(tmp_path / "kept")
    (runs_folder / "late").symlink_to(tmp_path / "kept")
    result = ludus("runs", "rm", "late", "--yes")
    assert result.code == 2
    assert "is a link" in result.err
    assert (tmp_path / "kept/metrics.jsonl").exists()
