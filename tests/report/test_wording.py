"""The words of views: games are won, tasks are solved, in one run or in several."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from ludus.env.evaluation import EpisodeOutcome, summarize
from ludus.proto.runs import METRICS_FILE, SUMMARY_FILE, EvalReport, Evaluation, Summary
from ludus.proto.wording import GAMES, MIXED, TASKS, choose_wording
from ludus.services.cli.tables import make_eval_tables, make_summary_tables
from ludus.services.report import write_comparison, write_figure, write_report
from ludus.services.run_list import read_listed_run
from tests.report.synthetic_run import build_run
from tests.report.test_report_page import find_all, join_text, parse


def build_mixed_run(run_dir: Path, tasks: str | None, *, is_finished: bool = True) -> Path:
    """Write the folder of a run of two environments, one of which has tasks."""
    build_run(run_dir, is_finished=is_finished, environments=("blackjack", "sums"))
    rows = list(map(json.loads, (run_dir / METRICS_FILE).read_text().splitlines()))
    for row in rows:
        row["is_game"] = row["environment"] != tasks
    (run_dir / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if is_finished:
        summary = json.loads((run_dir / SUMMARY_FILE).read_text())
        for name, result in summary["results"].items():
            result["report"]["is_game"] = name != tasks
        (run_dir / SUMMARY_FILE).write_text(json.dumps(summary))
    return run_dir


def remove_declarations(run_dir: Path) -> Path:
    """Change the files of a run to those of an earlier version."""
    for name in (METRICS_FILE, SUMMARY_FILE):
        text = re.sub(r'(, )?"is_game": (true|false)', "", (run_dir / name).read_text())
        (run_dir / name).write_text(text)
    return run_dir


def print_tables(tables) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def make_report(*, is_game: bool) -> EvalReport:
    outcomes = [
        EpisodeOutcome(seed, float(seed % 2), 1, success=seed % 2 == 1) for seed in range(8)
    ]
    return EvalReport(
        policy=summarize(outcomes),
        baselines={},
        temperature=1.0,
        gap_closed=None,
        gap_closed_ci95=None,
        is_game=is_game,
    )


def test_words_for_several_environments_fit_all_of_them() -> None:
    assert choose_wording(True, True) == choose_wording(True) == GAMES
    assert choose_wording(False) == choose_wording(False, False) == TASKS
    assert choose_wording(True, False) == MIXED


@pytest.mark.parametrize(
    ("is_game", "columns"), [(True, "wins ±95% draws"), (False, "solved ±95%")]
)
def test_table_of_tasks_has_no_wins_and_no_draws(is_game: bool, columns: str) -> None:
    evaluation = Evaluation(environments={"sums": make_report(is_game=is_game)})
    lines = print_tables(make_eval_tables(evaluation)).splitlines()
    [header] = [line for line in lines if "episodes" in line]
    assert " ".join(header.split()) == f"policy episodes {columns} return ±95%"


def test_end_table_of_a_mixed_run_has_the_words_of_each_environment(tmp_path: Path) -> None:
    run_dir = build_mixed_run(tmp_path / "mixed", tasks="sums")
    summary = Summary.model_validate_json((run_dir / SUMMARY_FILE).read_bytes())
    text = print_tables(make_summary_tables(summary))
    games, _, tasks = text.partition("demo, sums")
    assert "wins" in games and "draws" in games and "solved" not in games
    assert "solved" in tasks and "draws" not in tasks and "wins" not in tasks


@pytest.mark.slow
@pytest.mark.parametrize("is_finished", [True, False])
def test_report_of_a_mixed_run_has_both_rates(tmp_path: Path, is_finished: bool) -> None:
    run_dir = build_mixed_run(tmp_path / "mixed", tasks="sums", is_finished=is_finished)
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    titles = [join_text(tile).split(" ")[0] for tile in find_all(root, "main")]
    assert titles == ["Win", "Solve"]
    labels = [svg.get("aria-label", "") for svg in root.iter("svg")]
    for rate in ("Win rate", "Solve rate", "Wins", "Solved"):
        assert sum(label == f"{rate} over episodes trained" for label in labels) == 1
    if is_finished:
        headers = [join_text(head) for head in root.iter("thead")]
        assert ["Wins" in header for header in headers] == [True, False]
        assert ["Draws" in header for header in headers] == [True, False]


@pytest.mark.slow
def test_figure_of_tasks_speaks_of_solved_tasks(tmp_path: Path) -> None:
    run_dir = build_mixed_run(tmp_path / "demo", tasks="blackjack")
    figure = write_figure(run_dir, tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "42.9% solved" in figure and "Solve rate over episodes trained" in figure
    assert "wins" not in figure


@pytest.mark.slow
def test_comparison_of_games_and_tasks_says_success(tmp_path: Path) -> None:
    games = build_mixed_run(tmp_path / "games", tasks=None)
    tasks = build_mixed_run(tmp_path / "tasks", tasks="blackjack")
    page = write_comparison([games, tasks], tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<th class="number">Success</th>' in page
    assert "Success rate over episodes trained" in page  # of blackjack
    assert "Win rate over episodes trained" in page  # of sums


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "is_game"), [(None, True), ("blackjack", False)])
def test_listed_run_says_whether_its_first_environment_is_a_game(
    tmp_path: Path, tasks: str | None, is_game: bool
) -> None:
    finished_run = build_mixed_run(tmp_path / "finished", tasks)
    stopped_run = build_mixed_run(tmp_path / "stopped", tasks, is_finished=False)
    for run_dir in (finished_run, stopped_run):
        result = read_listed_run(run_dir).result
        assert result is not None
        assert (result.metric, result.is_game) == ("wins", is_game)


@pytest.mark.slow
def test_run_of_an_earlier_version_reads_as_games(tmp_path: Path) -> None:
    run_dir = remove_declarations(build_mixed_run(tmp_path / "old", tasks="sums"))
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "Win rate" in text and "Solve rate" not in text
    result = read_listed_run(run_dir).result
    assert result is not None and result.is_game
