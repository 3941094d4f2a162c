from __future__ import annotations

import json
import os
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
        "is_game": True,
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


@pytest.mark.parametrize(
    "name", ["lat", "notes", "../runs/late", "", ".", "..", "early/checkpoints"]
)
def test_rm_refuses_what_is_no_run(ludus: RunCli, runs_folder: Path, name: str) -> None:
    (runs_folder / "notes").mkdir()
    (runs_folder.parent / "metrics.jsonl").touch()
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


def test_rm_deletes_in_the_folder_of_either_option(ludus: RunCli, runs_folder: Path) -> None:
    runs_folder.rename(runs_folder.with_name("data"))
    assert ludus("runs", "--folder", "data", "rm", "early", "--yes").out == "deleted data/early\n"
    assert ludus("runs", "rm", "late", "--folder", "data", "--yes").out == "deleted data/late\n"


def test_rm_takes_no_json(ludus: RunCli, runs_folder: Path) -> None:
    result = ludus("runs", "--json", "rm", "early", "--yes")
    assert result.code == 2
    assert (runs_folder / "early/metrics.jsonl").exists()


def test_a_model_is_not_listed_and_not_deleted(ludus: RunCli, runs_folder: Path) -> None:
    (runs_folder / "model").mkdir()
    (runs_folder / "model/config.json").write_text('{"model_type": "llama", "name": "x"}')
    assert "model" not in read_listed_runs(ludus)
    assert ludus("runs", "rm", "model", "--yes").code == 2
    assert (runs_folder / "model/config.json").exists()


def test_a_resumed_run_shows_its_latest_evaluation(ludus: RunCli, runs_folder: Path) -> None:
    rows = [
        {"kind": "phase", "phase": "train", "step": 3, "num_steps": 6},
        {"kind": "eval", "step": 4, "environment": "openspiel", "values": {"win_rate": 0.125}},
        {"kind": "eval", "step": 4, "environment": "other", "values": {"win_rate": 0.5}},
        {"kind": "train", "step": 5, "values": {"entropy": 1.0}},
    ]
    with (runs_folder / "late/metrics.jsonl").open("a") as file:
        for row in rows:
            file.write(json.dumps(row | {"elapsed_s": 1.0, "num_games_trained": 1}) + "\n")
        file.write('{"kind": "train", "step": 6')  # incomplete
    run = read_listed_runs(ludus)["late"]
    assert (run["status"], run["step"], run["num_steps"]) == ("stopped", 5, 6)
    assert run["result"] == {"metric": "wins", "value": 0.125, "ci95": None, "is_game": True}


def test_a_long_run_shows_its_evaluation(ludus: RunCli, runs_folder: Path) -> None:
    (runs_folder / "late/summary.json").unlink()
    row = {"kind": "train", "step": 9, "elapsed_s": 1.0, "num_games_trained": 1}
    row["values"] = {f"reward_{index}": 0.5 for index in range(200)}
    with (runs_folder / "late/metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for _ in range(200))
    run = read_listed_runs(ludus)["late"]
    assert run["result"]["value"] == 0.401  # type: ignore[index]
    assert run["step"] == 9


def test_names_that_are_no_text_are_listed(ludus: RunCli, runs_folder: Path) -> None:
    (runs_folder / "late").rename(runs_folder / os.fsdecode(b"\xff"))
    assert "\\xff" in read_listed_runs(ludus)
    assert ludus("runs").code == 0
