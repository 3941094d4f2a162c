"""Tests of the page that compares several runs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ludus.proto.errors import ConfigError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import CONFIG_FILE, METRICS_FILE, MetricsRow, Phase, RowKind
from ludus.services.report import write_comparison, write_report
from tests.report.synthetic_run import BASELINES, build_run
from tests.report.test_report_page import find_all, join_text, parse

pytestmark = pytest.mark.slow


def compare(tmp_path: Path, *run_dirs: Path) -> str:
    return write_comparison(run_dirs, tmp_path / "page.html").read_text(encoding="utf-8")


def list_cells(table: ET.Element) -> list[list[str]]:
    return [[join_text(cell) for cell in row] for row in table.iter("tr")]


def change_config(run_dir: Path, section: str, field: str, value: object) -> None:
    config = json.loads((run_dir / CONFIG_FILE).read_text())
    config[section][field] = value
    (run_dir / CONFIG_FILE).write_text(json.dumps(config))


def insert_resume(run_dir: Path, step: int) -> None:
    """Insert the first row that a trainer writes when it resumes after `step`."""
    row = MetricsRow(
        kind="phase", step=step, phase=Phase.PREPARE_MODEL, elapsed_s=9.0, num_games_trained=0
    )
    lines = (run_dir / METRICS_FILE).read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if json.loads(line)["step"] > step)
    lines.insert(index, row.model_dump_json())
    (run_dir / METRICS_FILE).write_text("\n".join(lines) + "\n")


def test_page_shows_results_and_curves_of_all_runs(tmp_path: Path) -> None:
    runs = [
        build_run(tmp_path / "first", name="first"),
        build_run(tmp_path / "second", name="second", is_finished=False),
    ]
    root = parse(compare(tmp_path, *runs))
    _, first_row, second_row = list_cells(next(root.iter("table")))
    assert first_row[:2] == ["first", "42.9%"] and first_row[-3:-1] == ["120", "61,440"]
    assert second_row[0] == "second" and second_row[-3:-1] == ["47", "24,064"]
    assert "second: The run is not finished: step 47 of 120." in join_text(root)
    win_rates = next(svg for svg in root.iter("svg") if "Win rate" in svg.get("aria-label", ""))
    labels = [join_text(label) for label in find_all(win_rates, "policy")]
    assert [label.split()[-1] for label in labels] == ["first", "second"]
    assert len(find_all(win_rates, "band")) == len(find_all(win_rates, "curve")) == 2
    assert len(find_all(win_rates, "level")) == len(BASELINES)
    # All other charts also have a line of each run, in the same colors.
    for chart in root.iter("svg"):
        assert len(find_all(chart, "curve")) == 2
        assert find_all(chart, "run-0") and find_all(chart, "run-1")


def test_every_chart_names_its_lines(tmp_path: Path) -> None:
    names = [f"blackjack-learning-rate-{index}" for index in range(7)]
    runs = [build_run(tmp_path / name, name=name) for name in [*names, "unmeasured"]]
    rows = [json.loads(line) for line in (runs[-1] / METRICS_FILE).open()]
    for row in rows:
        row["values"].pop(TrainMetric.ENTROPY, None)
    (runs[-1] / METRICS_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    root = parse(compare(tmp_path, *runs))
    figures = {join_text(figure[0]).strip(): figure for figure in root.iter("figure")}
    for title, figure in figures.items():
        drawn_colors = [node.get("class") for node in figure.iter("g") if node.get("class")]
        if entries := find_all(figure, "run"):
            names_by_color = {entry.get("class"): entry.get("title") for entry in entries}
            expected_names = names if title.startswith("Entropy") else [*names, "unmeasured"]
            assert list(names_by_color.values()) == expected_names
            assert list(names_by_color) == [f"run {color}" for color in drawn_colors]
        else:
            labels = [join_text(label).split()[-1] for label in find_all(figure, "policy")]
            assert labels == [*(f"blackj…rate-{index}" for index in range(7)), "unmeasured"]
    assert any(find_all(figure, "run") for figure in figures.values())


def test_page_shows_the_differing_fields_without_credentials(tmp_path: Path) -> None:
    runs = [build_run(tmp_path / name, name=name) for name in ("first", "second")]
    change_config(runs[1], "learner", "learning_rate", 3e-4)
    change_config(
        runs[1], "environments", "blackjack", {"kind": "remote", "address": "http://u:pw@host:1"}
    )
    page = compare(tmp_path, *runs)
    table = list(parse(page).iter("table"))[-1]
    rows = {cells[0]: cells[1:] for cells in list_cells(table)}
    assert rows["Field"] == ["first", "second"]
    assert rows["learner.learning_rate"] == ["null", "0.0003"]
    assert rows["environments.blackjack.address"] == ["–", "http://host:1"]
    assert "training.num_steps" not in rows and "name" not in rows
    assert "pw@" not in page


def test_values_of_different_types_differ(tmp_path: Path) -> None:
    runs = [build_run(tmp_path / name, name=name) for name in ("first", "second")]
    for run_dir, decks in zip(runs, (1, "1"), strict=True):
        config = json.loads((run_dir / CONFIG_FILE).read_text())
        config["environments"]["blackjack"]["options"]["decks"] = decks
        (run_dir / CONFIG_FILE).write_text(json.dumps(config))
    page = join_text(parse(compare(tmp_path, *runs)))
    assert 'environments.blackjack.options.decks1"1"' in page


def test_a_run_without_a_configuration_has_no_differences(tmp_path: Path) -> None:
    runs = [build_run(tmp_path / name, name=name) for name in ("first", "second")]
    (runs[1] / CONFIG_FILE).unlink()
    text = join_text(parse(compare(tmp_path, *runs)))
    assert "Fewer than two runs have a readable configuration." in text


def test_fixed_policies_are_shown_whatever_the_order_of_runs(tmp_path: Path) -> None:
    finished = build_run(tmp_path / "finished")
    new = build_run(tmp_path / "new", is_finished=False)
    (new / METRICS_FILE).write_text("")
    for runs in ((finished, new), (new, finished)):
        root = parse(compare(tmp_path, *runs))
        win_rates = next(svg for svg in root.iter("svg") if "Win rate" in svg.get("aria-label", ""))
        assert len(find_all(win_rates, "level")) == len(BASELINES)
        assert len(list(next(root.iter("table")).iter("tr"))) == 1 + 2


def test_the_summary_of_an_earlier_end_is_left_out(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "resumed")
    with (run_dir / METRICS_FILE).open("a") as file:
        file.write(make_row("train", 160, {TrainMetric.REWARD_MEAN: 0.5}))
    report = join_text(parse(write_report(run_dir).read_text()))
    assert "summary.json is of step 120, before the run was resumed, and is left out." in report
    assert "The run is not finished: step 160 of 120." in report


def test_hidden_characters_of_names_are_shown(tmp_path: Path) -> None:
    runs = [build_run(tmp_path / name) for name in ("a\u202eb", "c")]
    assert "\u202e" not in compare(tmp_path, *runs)


def test_equal_configurations_are_said_to_be_equal(tmp_path: Path) -> None:
    runs = [build_run(tmp_path / name, name=name) for name in ("first", "second")]
    assert "All fields except the name are equal." in compare(tmp_path, *runs)


def test_resumes_are_marked_in_reports_and_comparisons(tmp_path: Path) -> None:
    resumed, other = (build_run(tmp_path / name, name=name) for name in ("resumed", "other"))
    insert_resume(resumed, 60)
    report = parse(write_report(resumed).read_text())
    assert "The run was resumed after step 60 (dotted vertical lines)." in join_text(report)
    curves = [svg for svg in report.iter("svg") if "over episodes" in svg.get("aria-label", "")]
    assert all(len(find_all(curve, "mark")) == 1 for curve in curves)
    page = parse(compare(tmp_path, resumed, other))
    assert "resumed was resumed after step 60" in join_text(page)


def test_reports_show_the_learning_rate(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    with (run_dir / METRICS_FILE).open("a") as file:
        file.write(make_row("train", 121, {TrainMetric.LEARNING_RATE: 1e-4}))
    captions = [join_text(node) for node in parse(write_report(run_dir).read_text()).iter("strong")]
    assert "Learning rate" in captions


def test_runs_of_one_name_are_called_by_their_paths(tmp_path: Path) -> None:
    runs = [build_run(tmp_path / parent / "demo") for parent in ("a", "b")]
    text = join_text(parse(compare(tmp_path, *runs)))
    assert str(runs[0]) in text and str(runs[1]) in text


def test_runs_may_train_in_different_environments(tmp_path: Path) -> None:
    first = build_run(tmp_path / "first", environments=("blackjack",))
    second = build_run(tmp_path / "second", environments=("blackjack", "catch"))
    root = parse(compare(tmp_path, first, second))
    assert [join_text(node) for node in find_all(root, "environment")] == ["blackjack", "catch"]
    assert len(list(next(root.iter("table")).iter("tr"))) == 1 + 3


def test_fine_tuning_runs_are_compared_by_their_loss(tmp_path: Path) -> None:
    runs = [build_fine_tuning_run(tmp_path / name, loss) for name, loss in (("a", 1.5), ("b", 2.0))]
    root = parse(compare(tmp_path, *runs))
    titles, *rows = list_cells(next(root.iter("table")))
    assert titles == ["Run", "Validation loss", "Steps", "Conversations", "Training time"]
    assert [row[:4] for row in rows] == [["a", "1.5000", "1", "8"], ["b", "2.0000", "1", "8"]]
    with pytest.raises(ConfigError, match="compare runs of one kind"):
        compare(tmp_path, runs[0], build_run(tmp_path / "policy"))


def test_too_many_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 8 runs, got 9"):
        compare(tmp_path, *[tmp_path / str(number) for number in range(9)])


def build_fine_tuning_run(run_dir: Path, loss: float) -> Path:
    run_dir.mkdir()
    config = {
        "kind": "sft",
        "name": run_dir.name,
        "model": {"path": "base"},
        "data": {"path": "data.jsonl"},
        "training": {"num_steps": 1},
    }
    (run_dir / CONFIG_FILE).write_text(json.dumps(config))
    rows = [
        make_row("train", 1, {TrainMetric.LOSS: loss}),
        make_row("event", 1, {TrainMetric.VALIDATION_LOSS: loss}),
    ]
    (run_dir / METRICS_FILE).write_text("".join(rows))
    return run_dir


def make_row(kind: RowKind, step: int, values: dict[str, float]) -> str:
    row = MetricsRow(kind=kind, step=step, elapsed_s=2.0, num_games_trained=8, values=values)
    return row.model_dump_json() + "\n"
