"""Tests of the report page and the figure of a run."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.metrics import REWARD_TERM_PREFIX, TrainMetric
from ludus.proto.runs import CHART_FILE, METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE, TRANSCRIPTS_FILE
from ludus.services.numbers import format_compact
from ludus.services.report import write_figure, write_report
from ludus.services.report.policy_grid import count_agreements
from tests.report.synthetic_run import (
    BASELINES,
    NUM_STEPS,
    build_chart,
    build_run,
    build_summary,
    make_metrics_rows,
    make_unlock_row,
    transcript,
)

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"


def parse(page: str) -> ET.Element:
    return ET.fromstring(page.removeprefix("<!doctype html>\n"))


def join_text(element: ET.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def find_all(root: ET.Element, name: str) -> list[ET.Element]:
    return [node for node in root.iter() if name in node.get("class", "").split()]


@pytest.fixture
def page(tmp_path: Path) -> str:
    return write_report(build_run(tmp_path / "demo")).read_text(encoding="utf-8")


def test_report_is_written_to_the_run_folder(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    assert write_report(run_dir) == run_dir / "report.html"
    assert write_report(run_dir, tmp_path / "other.html").is_file()


def test_page_says_how_many_of_the_requested_episodes_were_played(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    summary = json.loads((run_dir / SUMMARY_FILE).read_text())
    report = summary["results"]["blackjack"]["report"]
    num_games = report["policy"]["num_games"]
    report["num_games_requested"] = 2 * num_games
    report["baselines"]["random"] |= {"num_games": 9378, "num_void": 622}
    (run_dir / SUMMARY_FILE).write_text(json.dumps(summary))
    text = join_text(parse(write_report(run_dir).read_text(encoding="utf-8")))
    assert "9,378 of 10,000" in text
    assert f"{num_games:,} of {2 * num_games:,} episodes were played" in text
    assert "some episodes are void and not counted" in text


def test_page_is_well_formed_and_has_no_external_resources(page: str) -> None:
    root = parse(page)
    assert root.tag == "html"
    assert not list(root.iter("script"))
    assert not list(root.iter("link"))
    assert not list(root.iter("img"))
    assert not re.search(r"https?://|url\(|@import|src=|href=", page)


def test_headline_numbers_match_the_summary(page: str) -> None:
    summary = build_summary()
    tiles = [join_text(tile) for tile in find_all(parse(page), "tile")]
    win_rate_tile, return_tile, gap_tile, episodes_tile, time_tile = tiles
    assert f"{summary.win_rate:.1%}" in win_rate_tile
    low, high = (f"{bound * 100:.1f}" for bound in summary.win_rate_ci95)
    assert f"{low} to {high}%" in win_rate_tile
    assert f"{summary.expected_return:.3f}".replace("-", "−") in return_tile
    assert "96.1%" in gap_tile and "93.5 to 98.8%" in gap_tile
    assert "random to basic strategy" in gap_tile
    assert "61,440" in episodes_tile and "12 lost, 5 failed" in episodes_tile
    assert "94 s" in time_tile


def test_table_has_every_policy_with_summary_numbers(page: str) -> None:
    rows = [join_text(row) for row in parse(page).iter("tr")]
    names = ["policy before training", "policy after training", *BASELINES]
    assert len(rows) == len(names) + 1
    for name, (win_rate, _, expected_return) in BASELINES.items():
        row = next(row for row in rows if row.startswith(name.replace("_", " ")))
        assert f"{win_rate:.1%}" in row
        assert f"{expected_return:.3f}".replace("-", "−") in row


def test_learning_curves_end_at_the_summary_and_label_the_baselines(page: str) -> None:
    charts = parse(page).iter("svg")
    curves = [svg for svg in charts if "over episodes" in svg.get("aria-label", "")]
    win_rate_chart = curves[0]
    labels = [join_text(label) for label in find_all(win_rate_chart, "label")]
    assert {"28.1% random", "38.5% always stand", "43.3% basic strategy"} <= set(labels)
    assert f"{build_summary().win_rate:.1%} this policy" in labels
    num_evals = sum(row.kind == "eval" for row in make_metrics_rows(NUM_STEPS))
    assert len(find_all(win_rate_chart, "dot")) == num_evals + 1
    assert len(find_all(win_rate_chart, "band")) == 1
    # The line of the goal has a different class from the lines of the other baselines.
    assert len(find_all(win_rate_chart, "level")) == len(BASELINES)
    assert [join_text(line) for line in find_all(win_rate_chart, "goal") if line.tag == "text"] == [
        "43.3% basic strategy"
    ]


def test_the_policy_chart_outlines_differences(page: str) -> None:
    chart = build_chart()
    root = parse(page)
    letters = find_all(root, "letter")
    assert len(letters) == 2 * len(chart.cells)
    num_different = len(chart.cells) - count_agreements(chart)
    assert num_different > 0
    assert len(find_all(root, "differs")) == num_different
    assert f"{count_agreements(chart)} of {len(chart.cells)} answers" in join_text(root)
    titles = [title.text or "" for title in root.iter("title")]
    assert any(title.startswith("hard hands 16 against 10: HIT ") for title in titles)


def test_training_curves_are_small_multiples_with_units(page: str) -> None:
    captions = [join_text(caption) for caption in parse(page).iter("figcaption")]
    # The run has eight curves, and its environment has three.
    assert len(captions) == 8 + 3
    assert any(caption.startswith("Generation tokens per second") for caption in captions)


def test_page_has_curves_of_invalid_answers_truncations_and_turns(page: str) -> None:
    captions = [join_text(caption) for caption in parse(page).iter("figcaption")]
    last_counts = [512 // (4 + step) for step in range(NUM_STEPS - 9, NUM_STEPS + 1)]
    share = format_compact(sum(last_counts) / (10 * 512))
    assert f"Invalid answers share of episodes {share}" in captions
    assert "Truncated share of episodes 0" in captions
    assert any(caption.startswith("Turns mean per episode 2.") for caption in captions)


def test_page_has_curves_of_reward_terms_and_tool_calls_if_they_exist(tmp_path: Path) -> None:
    environments = ("blackjack", "catch")
    run_dir = build_run(tmp_path / "mixed", environments=environments)
    rows = []
    for row in make_metrics_rows(NUM_STEPS, environments):
        extra_values = {}
        if row.kind == "environment" and row.environment == "catch":
            extra_values = {
                f"{REWARD_TERM_PREFIX}brevity": -0.25,
                TrainMetric.NUM_TOOL_CALLS: 256,
                TrainMetric.NUM_TOOL_CALLS_FAILED: 64,
            }
        rows.append(row.model_copy(update={"values": row.values | extra_values}))
    lines = "".join(row.model_dump_json() + "\n" for row in rows)
    (run_dir / METRICS_FILE).write_text(lines, encoding="utf-8")
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    (blackjack,), (catch,) = (
        [
            [join_text(caption) for caption in section.iter("figcaption")]
            for section in root.iter("div")
            if any(join_text(heading) == name for heading in section.findall("h3"))
            and list(section.iter("figcaption"))
        ]
        for name in environments
    )
    catch_captions = {
        "brevity reward term, unweighted −0.25",
        "Tool calls mean per episode 0.5",
        "Failed tool calls share of calls 0.25",
    }
    assert catch_captions <= set(catch)
    assert [caption for caption in catch if caption.startswith("environment reward term")]
    assert len(catch) == len(blackjack) + 4


def test_curriculum_steps_are_marked_in_every_curve(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "mixed", environments=("easy", "hard"))
    with (run_dir / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(make_unlock_row(60, "hard").model_dump_json() + "\n")
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    curves = [svg for svg in root.iter("svg") if "over episodes" in svg.get("aria-label", "")]
    assert len(curves) > 4
    for curve in curves:
        assert len(find_all(curve, "mark")) == 1
        assert "after 30,720 episodes: the curriculum opens hard" in join_text(curve)
    assert join_text(root).count("the curriculum opens hard after 30,720 episodes") == 2


def test_a_run_without_a_curriculum_has_no_marks(page: str) -> None:
    assert not find_all(parse(page), "mark")
    assert "curriculum opens" not in page


def test_configuration_and_versions_are_in_collapsed_sections(page: str) -> None:
    details = {
        join_text(section.find("summary")): join_text(section)  # type: ignore[arg-type]
        for section in parse(page).iter("details")
    }
    assert '"groups_per_step": 32' in details["Configuration, resolved"]
    assert "2.13.0" in details["Package versions"]


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert('x')</script> & \"co\""
    run_dir = build_run(tmp_path / "demo")
    fields = {"name": name, "environment": name, "versions": {name: name}}
    result = build_summary().results["blackjack"]
    report = result.report.model_copy(
        update={"baselines": {name: result.report.baselines["random"]}}
    )
    results = {name: result.model_copy(update={"environment": name, "report": report})}
    results["other"] = results[name]
    summary = build_summary().model_copy(update={**fields, "results": results})
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
    assert join_text(next(root.iter("h1"))) == name
    ET.parse(write_figure(run_dir, tmp_path / "figure.svg"))


def test_unfinished_run_has_a_notice_and_shows_available_data(tmp_path: Path) -> None:
    page = write_report(build_run(tmp_path / "half", is_finished=False)).read_text()
    root = parse(page)
    (notices,) = find_all(root, "notices")
    assert "The run is not finished: step 47 of 120." in join_text(notices)
    assert "summary.json is missing." in join_text(notices)
    assert "at step 40, the latest evaluation" in join_text(find_all(root, "tile")[0])
    assert find_all(root, "curve")
    assert not list(root.iter("table"))
    # Rows of earlier evaluations include the baselines.
    assert "43.3% basic strategy" in [join_text(label) for label in find_all(root, "label")]


def test_mixed_run_shows_every_environment_by_name(tmp_path: Path) -> None:
    names = ("blackjack", "catch")
    page = write_report(build_run(tmp_path / "mixed", environments=names)).read_text()
    root = parse(page)
    assert [join_text(heading) for heading in find_all(root, "group")] == list(names)
    # Each environment has three tiles (win rate, return and gap), and the run has two.
    assert len(find_all(root, "tile")) == 2 * 3 + 2
    assert len(list(root.iter("table"))) == 2
    headings = [join_text(heading) for heading in find_all(root, "environment")]
    assert headings == [*names, *names, *names]
    captions = [join_text(caption) for caption in root.iter("figcaption")]
    assert sum(caption.startswith("Wins share of episodes") for caption in captions) == 2
    assert "openspiel_env (game = blackjack) and openspiel_env (game = catch)" in join_text(root)


def test_unfinished_mixed_run_shows_latest_evaluation_per_environment(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "half", is_finished=False, environments=("blackjack", "catch"))
    root = parse(write_report(run_dir).read_text())
    tiles = [tile for tile in find_all(root, "tile") if "the latest evaluation" in join_text(tile)]
    assert len(tiles) == 2


def test_a_run_without_metrics_has_a_notice(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "empty", is_finished=False)
    (run_dir / METRICS_FILE).write_text("")
    root = parse(write_report(run_dir).read_text())
    assert "No metrics were recorded" in join_text(find_all(root, "notices")[0])
    assert not list(root.iter("svg"))


def test_damaged_files_are_reported_by_name(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    (run_dir / METRICS_FILE).write_text('{"kind": "rumour"}\n')
    (run_dir / CHART_FILE).write_text("not json")
    root = parse(write_report(run_dir).read_text())
    page_text = join_text(find_all(root, "notices")[0])
    assert "metrics.jsonl cannot be read: kind" in page_text
    assert "chart.json cannot be read" in page_text
    assert len(find_all(root, "tile")) == 5


def test_summary_of_a_stopped_run_has_a_notice(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    result = build_summary().results["blackjack"]
    report_without_gap = result.report.model_copy(update={"gap_closed": None})
    results = {"blackjack": result.model_copy(update={"report": report_without_gap})}
    stopped_summary = build_summary().model_copy(update={"finished": False, "results": results})
    (run_dir / SUMMARY_FILE).write_text(stopped_summary.model_dump_json())
    root = parse(write_report(run_dir).read_text())
    assert "stopped before its last step" in join_text(find_all(root, "notices")[0])
    assert len(find_all(root, "tile")) == 4


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"has none of config\.json, metrics\.jsonl"):
        write_report(tmp_path)


def test_an_unwritable_path_is_refused(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(run_dir, tmp_path / "no" / "such" / "folder.html")


def test_figure_is_a_standalone_svg(tmp_path: Path) -> None:
    path = write_figure(build_run(tmp_path / "demo"), tmp_path / "figure.svg")
    root = ET.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    page_text = join_text(root)
    assert "Win rate over episodes trained" in page_text
    assert "basic strategy, hard hands" in page_text
    content = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|url\(|@import|href=", content)


def test_figure_of_a_mixed_run_uses_the_environment_with_a_chart(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "mixed", environments=("catch", "blackjack"))
    page_text = join_text(ET.parse(write_figure(run_dir, tmp_path / "figure.svg")).getroot())
    assert "basic strategy, hard hands" in page_text
    (run_dir / CHART_FILE).unlink()
    text_without_chart = join_text(
        ET.parse(write_figure(run_dir, tmp_path / "figure.svg")).getroot()
    )
    assert "hard hands" not in text_without_chart


def remove_success(run_dir: Path) -> Path:
    """Remove all success fields from the files of a run; return the run folder."""

    def clear_success_fields(value: Any) -> Any:
        if isinstance(value, dict):
            success_fields = {"win_rate", "win_rate_ci95", "draw_rate"} & value.keys()
            return {
                name: clear_success_fields(item) for name, item in value.items()
            } | dict.fromkeys(success_fields)
        return value

    rows = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
    for row in rows:
        values = {
            name: value for name, value in row["values"].items() if not re.match("win|draw", name)
        }
        row["values"] = values
    (run_dir / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if (run_dir / SUMMARY_FILE).exists():
        summary = clear_success_fields(json.loads((run_dir / SUMMARY_FILE).read_text()))
        (run_dir / SUMMARY_FILE).write_text(json.dumps(summary))
    return run_dir


@pytest.mark.parametrize("is_finished", [True, False])
def test_report_without_success_shows_the_return(tmp_path: Path, is_finished: bool) -> None:
    run_dir = remove_success(build_run(tmp_path / "demo", is_finished=is_finished))
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    assert "Win rate" not in join_text(root)
    [main] = find_all(root, "main")
    assert join_text(main).startswith("Expected return")
    if is_finished:
        row = next(
            join_text(node) for node in root.iter("tr") if "basic strategy" in join_text(node)
        )
        assert "– – –" in row, "the win rate, its interval or the draw rate is not a dash"
    figure = join_text(ET.parse(write_figure(run_dir, tmp_path / "figure.svg")).getroot())
    assert "Expected return over episodes trained" in figure
    assert "wins" not in figure


def test_a_figure_needs_an_evaluation(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo", is_finished=False)
    (run_dir / METRICS_FILE).write_text("")
    with pytest.raises(ConfigError, match="has no evaluation yet"):
        write_figure(run_dir, tmp_path / "figure.svg")


def test_first_and_last_responses_are_shown(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    transcripts = [transcript(step, answer=f"<b>{step}</b>") for step in range(1, 21)]
    lines = "".join(episode.model_dump_json() + "\n" for episode in transcripts)
    (run_dir / TRANSCRIPTS_FILE).write_text(lines, encoding="utf-8")
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    shown_responses = [join_text(node) for node in find_all(root, "said")]
    assert shown_responses == [f"policy<b>{step}</b>" for step in (1, 2, 3, 18, 19, 20)]


def test_same_episodes_before_and_after_training_are_shown_next_to_each_other(
    tmp_path: Path,
) -> None:
    run_dir = build_run(tmp_path / "demo")
    samples = [
        transcript(step, answer=answer).model_copy(update={"seed": seed, "episode_return": result})
        for step, seed, answer, result in (
            (0, 5, "<b>STAND", -1.0),
            (0, 6, "only before", -1.0),
            (60, 5, "HIT in between", -1.0),
            (120, 5, "HIT", 1.0),
        )
    ]
    lines = "".join(sample.model_dump_json() + "\n" for sample in samples)
    (run_dir / SAMPLES_FILE).write_text(lines, encoding="utf-8")
    page = write_report(run_dir).read_text(encoding="utf-8")
    [table] = find_all(parse(page), "answers")
    cells = [" ".join(join_text(cell).split()) for cell in table.iter("td")]
    assert cells == ["hard 15 vs 10", "<b>STAND", "−1", "HIT", "1"]
    (run_dir / SAMPLES_FILE).unlink()
    assert "Before and after" not in write_report(run_dir).read_text(encoding="utf-8")


def test_failure_reason_is_below_the_episode(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    reason = "ValueError: no such card <b> (in parse, cards.py:7)"
    failed_episode = transcript(1).model_copy(update={"status": "failed", "failure": reason})
    lines = "".join(episode.model_dump_json() + "\n" for episode in (failed_episode, transcript(2)))
    (run_dir / TRANSCRIPTS_FILE).write_text(lines, encoding="utf-8")
    root = parse(write_report(run_dir).read_text(encoding="utf-8"))
    assert [join_text(node) for node in find_all(root, "failure")] == [f"failure{reason}"]


def test_unreadable_transcripts_are_reported(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    (run_dir / TRANSCRIPTS_FILE).write_text('{"step": "x"}\n')
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "transcripts.jsonl cannot be read: step" in page
    assert "Learning" in page


def test_a_page_has_no_password_of_a_server(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    config = json.loads((run_dir / "config.json").read_bytes())
    name = next(iter(config["environments"]))
    address = "http://user:secret@127.0.0.1:8000"
    config["environments"] = {name: {"kind": "remote", "address": address}}
    (run_dir / "config.json").write_text(json.dumps(config))
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "127.0.0.1:8000" in page
    assert "secret" not in page
