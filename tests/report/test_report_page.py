from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.metrics import REWARD_TERM_PREFIX, TrainMetric
from ludus.proto.runs import CHART_FILE, METRICS_FILE, SUMMARY_FILE, TRANSCRIPTS_FILE
from ludus.services.numbers import format_compact
from ludus.services.report import write_figure, write_report
from ludus.services.report.policy_grid import count_agreements
from tests.report.synthetic_run import (
    BASELINES,
    NUM_STEPS,
    build_chart,
    build_run,
    build_summary,
    metrics_rows,
    transcript,
    unlock_row,
)

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"


def parse(page: str) -> ET.Element:
    return ET.fromstring(page.removeprefix("<!doctype html>\n"))


def text_of(element: ET.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def by_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [node for node in root.iter() if name in node.get("class", "").split()]


@pytest.fixture
def page(tmp_path: Path) -> str:
    return write_report(build_run(tmp_path / "demo")).read_text(encoding="utf-8")


def test_the_report_is_written_into_the_runs_folder(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    assert write_report(run_dir) == run_dir / "report.html"
    assert write_report(run_dir, tmp_path / "other.html").is_file()


def test_the_page_is_well_formed_and_needs_nothing_else(page: str) -> None:
    root = parse(page)
    assert root.tag == "html"
    assert not list(root.iter("script"))
    assert not list(root.iter("link"))
    assert not list(root.iter("img"))
    assert not re.search(r"https?://|url\(|@import|src=|href=", page)


def test_headline_numbers_are_those_of_the_summary(page: str) -> None:
    summary = build_summary()
    tiles = [text_of(tile) for tile in by_class(parse(page), "tile")]
    win_rate, expected_return, gap, games, time = tiles
    assert f"{summary.win_rate:.1%}" in win_rate
    low, high = (f"{end * 100:.1f}" for end in summary.win_rate_ci95)
    assert f"{low} to {high}%" in win_rate
    assert f"{summary.expected_return:.3f}".replace("-", "−") in expected_return
    assert "96.1%" in gap and "93.5 to 98.8%" in gap and "random to basic strategy" in gap
    assert "61,440" in games and "12 lost, 5 failed" in games
    assert "94 s" in time


def test_the_table_has_every_policy_with_the_numbers_of_the_summary(page: str) -> None:
    rows = [text_of(row) for row in parse(page).iter("tr")]
    names = ["policy before training", "policy after training", *BASELINES]
    assert len(rows) == len(names) + 1
    for name, (win_rate, _, expected_return) in BASELINES.items():
        row = next(row for row in rows if row.startswith(name.replace("_", " ")))
        assert f"{win_rate:.1%}" in row
        assert f"{expected_return:.3f}".replace("-", "−") in row


def test_learning_curves_end_at_the_summary_and_name_the_baselines(page: str) -> None:
    charts = parse(page).iter("svg")
    curves = [svg for svg in charts if "over episodes" in svg.get("aria-label", "")]
    win_rate = curves[0]
    labels = [text_of(label) for label in by_class(win_rate, "label")]
    assert {"28.1% random", "38.5% always stand", "43.3% basic strategy"} <= set(labels)
    assert f"{build_summary().win_rate:.1%} this policy" in labels
    num_evals = sum(row.kind == "eval" for row in metrics_rows(NUM_STEPS))
    assert len(by_class(win_rate, "dot")) == num_evals + 1
    assert len(by_class(win_rate, "band")) == 1
    # The goal is drawn apart from the other levels.
    assert len(by_class(win_rate, "level")) == len(BASELINES)
    assert [text_of(line) for line in by_class(win_rate, "goal") if line.tag == "text"] == [
        "43.3% basic strategy"
    ]


def test_the_policy_chart_has_every_situation_twice_and_outlines_what_differs(page: str) -> None:
    chart = build_chart()
    root = parse(page)
    letters = by_class(root, "letter")
    assert len(letters) == 2 * len(chart.cells)
    num_different = len(chart.cells) - count_agreements(chart)
    assert num_different > 0
    assert len(by_class(root, "differs")) == num_different
    assert f"{count_agreements(chart)} of {len(chart.cells)} answers" in text_of(root)
    titles = [title.text or "" for title in root.iter("title")]
    assert any(title.startswith("hard hands 16 against 10: HIT ") for title in titles)


def test_training_curves_are_small_multiples_with_units(page: str) -> None:
    captions = [text_of(caption) for caption in parse(page).iter("figcaption")]
    # Eight of the run, and what its environment has of its own.
    assert len(captions) == 8 + 3
    assert any(caption.startswith("Generation tokens per second") for caption in captions)


def test_what_goes_wrong_in_episodes_and_how_long_they_are_has_curves(page: str) -> None:
    captions = [text_of(caption) for caption in parse(page).iter("figcaption")]
    last = [512 // (4 + step) for step in range(NUM_STEPS - 9, NUM_STEPS + 1)]
    share = format_compact(sum(last) / (10 * 512))
    assert f"Invalid answers share of episodes {share}" in captions
    assert "Truncated share of episodes 0" in captions
    assert any(caption.startswith("Turns mean per episode 2.") for caption in captions)


def test_terms_and_tools_have_curves_where_there_are_any(tmp_path: Path) -> None:
    environments = ("blackjack", "catch")
    run_dir = build_run(tmp_path / "mixed", environments=environments)
    rows = []
    for row in metrics_rows(NUM_STEPS, environments):
        more = {}
        if row.kind == "environment" and row.environment == "catch":
            more = {
                f"{REWARD_TERM_PREFIX}brevity": -0.25,
                TrainMetric.NUM_TOOL_CALLS: 256,
                TrainMetric.NUM_TOOL_CALLS_FAILED: 64,
            }
        rows.append(row.model_copy(update={"values": row.values | more}))
    lines = "".join(row.model_dump_json() + "\n" for row in rows)
    (run_dir / METRICS_FILE).write_text(lines, encoding="utf-8")
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    (blackjack,), (catch,) = (
        [
            [text_of(caption) for caption in part.iter("figcaption")]
            for part in root.iter("div")
            if any(text_of(head) == name for head in part.findall("h3"))
            and list(part.iter("figcaption"))
        ]
        for name in environments
    )
    only_catch = {
        "brevity reward term, unweighted −0.25",
        "Tool calls mean per episode 0.5",
        "Failed tool calls share of calls 0.25",
    }
    assert only_catch <= set(catch)
    assert [one for one in catch if one.startswith("environment reward term")]
    assert len(catch) == len(blackjack) + 4


def test_what_the_curriculum_opened_is_marked_in_every_curve_over_games(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "mixed", environments=("easy", "hard"))
    with (run_dir / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(unlock_row(60, "hard").model_dump_json() + "\n")
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    curves = [svg for svg in root.iter("svg") if "over episodes" in svg.get("aria-label", "")]
    assert len(curves) > 4
    for curve in curves:
        assert len(by_class(curve, "mark")) == 1
        assert "after 30,720 episodes: the curriculum opens hard" in text_of(curve)
    assert text_of(root).count("the curriculum opens hard after 30,720 episodes") == 2


def test_a_run_without_a_curriculum_has_no_marks(page: str) -> None:
    assert not by_class(parse(page), "mark")
    assert "curriculum opens" not in page


def test_configuration_and_versions_are_there_but_folded(page: str) -> None:
    details = {text_of(d.find("summary")): text_of(d) for d in parse(page).iter("details")}  # type: ignore[arg-type]
    assert '"groups_per_step": 32' in details["Configuration, resolved"]
    assert "2.13.0" in details["Package versions"]


def test_hostile_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    name = "<script>alert('x')</script> & \"co\""
    run_dir = build_run(tmp_path / "demo")
    hostile = {"name": name, "environment": name, "versions": {name: name}}
    result = build_summary().results["blackjack"]
    report = result.report.model_copy(
        update={"baselines": {name: result.report.baselines["random"]}}
    )
    results = {name: result.model_copy(update={"environment": name, "report": report})}
    results["other"] = results[name]
    summary = build_summary().model_copy(update={**hostile, "results": results})
    (run_dir / SUMMARY_FILE).write_text(summary.model_dump_json())
    chart = build_chart()
    cells = [cell.model_copy(update={"panel": name, "row": name}) for cell in chart.cells[:3]]
    hostile_chart = chart.model_copy(
        update={"environment": name, "cells": tuple(cells), "answers": (name, "STAND")}
    )
    (run_dir / CHART_FILE).write_text(hostile_chart.model_dump_json())
    page = write_report(run_dir).read_text()
    root = parse(page)
    assert "<script" not in page
    assert text_of(next(root.iter("h1"))) == name
    ET.parse(write_figure(run_dir, tmp_path / "figure.svg"))


def test_an_unfinished_run_says_so_and_shows_what_there_is(tmp_path: Path) -> None:
    page = write_report(build_run(tmp_path / "half", finished=False)).read_text()
    root = parse(page)
    (notices,) = by_class(root, "notices")
    assert "The run is not finished: step 47 of 120." in text_of(notices)
    assert "summary.json is missing." in text_of(notices)
    assert "at step 40, the latest evaluation" in text_of(by_class(root, "tile")[0])
    assert by_class(root, "curve")
    assert not list(root.iter("table"))
    # The fixed policies are known from the evaluations so far.
    assert "43.3% basic strategy" in [text_of(label) for label in by_class(root, "label")]


def test_a_mixed_run_shows_every_environment_under_its_name(tmp_path: Path) -> None:
    names = ("blackjack", "catch")
    page = write_report(build_run(tmp_path / "mixed", environments=names)).read_text()
    root = parse(page)
    assert [text_of(head) for head in by_class(root, "group")] == list(names)
    # Win rate, return and gap for each; games and time for the run.
    assert len(by_class(root, "tile")) == 2 * 3 + 2
    assert len(list(root.iter("table"))) == 2
    heads = [text_of(head) for head in by_class(root, "environment")]
    assert heads == [*names, *names, *names]
    captions = [text_of(caption) for caption in root.iter("figcaption")]
    assert sum(caption.startswith("Wins share of episodes") for caption in captions) == 2
    assert "openspiel_env (game = blackjack) and openspiel_env (game = catch)" in text_of(root)


def test_an_unfinished_mixed_run_shows_the_latest_evaluation_of_each(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "half", finished=False, environments=("blackjack", "catch"))
    root = parse(write_report(run_dir).read_text())
    latest = [tile for tile in by_class(root, "tile") if "the latest evaluation" in text_of(tile)]
    assert len(latest) == 2


def test_a_run_without_metrics_gives_a_page_that_says_so(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "empty", finished=False)
    (run_dir / METRICS_FILE).write_text("")
    root = parse(write_report(run_dir).read_text())
    assert "No metrics were recorded" in text_of(by_class(root, "notices")[0])
    assert not list(root.iter("svg"))


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    (run_dir / METRICS_FILE).write_text('{"kind": "rumour"}\n')
    (run_dir / CHART_FILE).write_text("not json")
    root = parse(write_report(run_dir).read_text())
    said = text_of(by_class(root, "notices")[0])
    assert "metrics.jsonl cannot be read: kind" in said
    assert "chart.json cannot be read" in said
    assert len(by_class(root, "tile")) == 5


def test_a_summary_of_a_stopped_run_is_marked_as_such(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    result = build_summary().results["blackjack"]
    no_gap = result.report.model_copy(update={"gap_closed": None})
    results = {"blackjack": result.model_copy(update={"report": no_gap})}
    stopped = build_summary().model_copy(update={"finished": False, "results": results})
    (run_dir / SUMMARY_FILE).write_text(stopped.model_dump_json())
    root = parse(write_report(run_dir).read_text())
    assert "stopped before its last step" in text_of(by_class(root, "notices")[0])
    assert len(by_class(root, "tile")) == 4


def test_a_folder_without_a_run_is_refused_with_what_is_near(tmp_path: Path) -> None:
    build_run(tmp_path / "demo")
    with pytest.raises(NotFoundError, match=r"does not exist; .* has demo"):
        write_report(tmp_path / "dmeo")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(run_dir, tmp_path / "no" / "such" / "folder.html")


def test_the_figure_is_one_standalone_picture(tmp_path: Path) -> None:
    path = write_figure(build_run(tmp_path / "demo"), tmp_path / "figure.svg")
    root = ET.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    said = text_of(root)
    assert "Win rate over episodes trained" in said
    assert "basic strategy, hard hands" in said
    content = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|url\(|@import|href=", content)


def test_the_figure_of_a_mixed_run_is_of_the_environment_that_has_a_chart(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "mixed", environments=("catch", "blackjack"))
    said = text_of(ET.parse(write_figure(run_dir, tmp_path / "figure.svg")).getroot())
    assert "basic strategy, hard hands" in said
    (run_dir / CHART_FILE).unlink()
    alone = text_of(ET.parse(write_figure(run_dir, tmp_path / "figure.svg")).getroot())
    assert "hard hands" not in alone


def without_wins(run_dir: Path) -> Path:
    """The run, in an environment that does not say whether its episodes succeed."""

    def silent(value: Any) -> Any:
        if isinstance(value, dict):
            unknown = {"win_rate", "win_rate_ci95", "draw_rate"} & value.keys()
            return {name: silent(one) for name, one in value.items()} | dict.fromkeys(unknown)
        return value

    rows = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
    for row in rows:
        values = {name: v for name, v in row["values"].items() if not re.match("win|draw", name)}
        row["values"] = values
    (run_dir / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if (run_dir / SUMMARY_FILE).exists():
        summary = silent(json.loads((run_dir / SUMMARY_FILE).read_text()))
        (run_dir / SUMMARY_FILE).write_text(json.dumps(summary))
    return run_dir


@pytest.mark.parametrize("finished", [True, False])
def test_where_nobody_says_what_a_win_is_the_report_shows_the_return(
    tmp_path: Path, finished: bool
) -> None:
    run_dir = without_wins(build_run(tmp_path / "demo", finished=finished))
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    assert "Win rate" not in text_of(root)
    [main] = by_class(root, "main")
    assert text_of(main).startswith("Expected return")
    if finished:
        row = next(text_of(node) for node in root.iter("tr") if "basic strategy" in text_of(node))
        assert "–––" in row, "rate, interval and draws"
    figure = text_of(ET.parse(write_figure(run_dir, tmp_path / "figure.svg")).getroot())
    assert "Expected return over episodes trained" in figure
    assert "wins" not in figure


def test_a_figure_needs_an_evaluation(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo", finished=False)
    (run_dir / METRICS_FILE).write_text("")
    with pytest.raises(ConfigError, match="has no evaluation yet"):
        write_figure(run_dir, tmp_path / "figure.svg")


def test_what_the_policy_said_is_shown_from_the_beginning_and_the_end(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    said = [transcript(step, answer=f"<b>{step}</b>") for step in range(1, 21)]
    lines = "".join(one.model_dump_json() + "\n" for one in said)
    (run_dir / TRANSCRIPTS_FILE).write_text(lines, encoding="utf-8")
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    shown = [text_of(node) for node in by_class(root, "said")]
    assert shown == [f"policy<b>{step}</b>" for step in (1, 2, 3, 18, 19, 20)]


def test_what_ended_an_episode_is_said_under_it(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    reason = "ValueError: no such card <b> (in parse, cards.py:7)"
    failed = transcript(1).model_copy(update={"status": "failed", "failure": reason})
    lines = "".join(one.model_dump_json() + "\n" for one in (failed, transcript(2)))
    (run_dir / TRANSCRIPTS_FILE).write_text(lines, encoding="utf-8")
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    assert [text_of(node) for node in by_class(root, "failure")] == [f"failure{reason}"]


def test_transcripts_that_cannot_be_read_are_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    (run_dir / TRANSCRIPTS_FILE).write_text('{"step": "x"}\n')
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "transcripts.jsonl cannot be read: step" in page
    assert "Learning" in page
