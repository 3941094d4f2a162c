"""Tests of the chart of a training step: who waited for whom."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest

from ludus.proto.errors import NotFoundError
from ludus.proto.runs import TRACE_FILE, DeliverySpan, PlaySpan, StepTrace
from ludus.services.report import write_report
from ludus.services.report.step_trace import MAX_WORKERS, make_step_charts
from tests.report.synthetic_run import build_run

START_S = 1_700_000_000.0


def make_step(
    step: int, start_s: float, duration_s: float, plays: Sequence[PlaySpan] = ()
) -> StepTrace:
    """Return a step whose learner waits for half of it."""
    return StepTrace(
        step=step,
        end_s=START_S + start_s + duration_s,
        wait_s=duration_s / 2,
        train_s=duration_s / 4,
        publish_s=duration_s / 4,
        plays=tuple(plays),
    )


def play(worker: int, start_s: float, end_s: float, num_groups: int = 1) -> PlaySpan:
    return PlaySpan(
        worker=worker, num_groups=num_groups, start_s=START_S + start_s, end_s=START_S + end_s
    )


def test_a_typical_and_the_longest_step_are_shown() -> None:
    durations = [30.0, 9.0, 4.0, 5.0, 6.0]
    traces = [make_step(step, 100.0 * step, s) for step, s in enumerate(durations, 1)]
    assert [chart.trace.step for chart in make_step_charts(traces)] == [4, 1]
    assert [chart.trace.step for chart in make_step_charts(traces, 3)] == [3]
    assert [chart.trace.step for chart in make_step_charts(traces[:1])] == [1]
    assert make_step_charts([]) == []


def test_a_step_that_was_trained_again_is_shown_as_it_was_last() -> None:
    traces = [make_step(1, 0.0, 4.0), make_step(2, 4.0, 4.0), make_step(2, 100.0, 6.0)]
    (chart,) = make_step_charts(traces, 2)
    assert chart.trace.duration_s == pytest.approx(6.0)


def test_a_missing_step_is_refused_with_the_steps_there_are() -> None:
    traces = [make_step(3, 0.0, 4.0), make_step(4, 4.0, 4.0)]
    with pytest.raises(NotFoundError, match=r"has no step 7; it has steps 3 to 4"):
        make_step_charts(traces, 7)


def test_calls_that_end_in_a_later_step_count_as_busy() -> None:
    traces = [
        make_step(1, 0.0, 10.0, [play(0, 0.0, 4.0)]),
        make_step(2, 10.0, 10.0, [play(0, 6.0, 12.0), play(1, 2.0, 15.0)]),
    ]
    sentences = " ".join(make_step_charts(traces, 1)[0].describe())
    assert "The learner waited 5.0 s for groups (50% of the step)" in sentences
    # Worker 0 is idle from 4 to 6 s and worker 1 from 0 to 2 s; the calls that ended are counted.
    assert "it had no group to play for 2.0 s (20%)" in sentences
    assert "1 group ended in the step" in sentences


def test_areas_show_the_number_of_groups_in_play() -> None:
    plays = [play(0, 0.0, 8.0), play(0, 2.0, 8.0), play(1, 4.0, 8.0)]
    (chart,) = make_step_charts([make_step(1, 0.0, 8.0, plays)])
    learner, weights, first, second = chart.make_rows()
    assert [bar.css_class for bar in learner.bars] == ["wait", "busy", "send"]
    assert not weights.bars
    assert first.tooltip == "worker 0: up to 2 groups at a time"

    def read_heights(polygon: str) -> list[float]:
        return [float(point.split(",")[1]) for point in polygon.split()]

    # The first worker reaches the full height of its row, the second half of it.
    assert min(read_heights(first.polygon)) == first.y
    assert min(read_heights(second.polygon)) == second.y + second.height / 2


def test_a_chart_of_many_workers_says_how_many_it_leaves_out() -> None:
    plays = [play(worker, 0.0, 8.0) for worker in range(MAX_WORKERS + 3)]
    (chart,) = make_step_charts([make_step(1, 0.0, 8.0, plays)])
    assert len(chart.make_rows()) == 2 + MAX_WORKERS
    assert "The chart leaves out 3 more workers." in list(chart.describe())


def test_deliveries_are_cut_at_the_ends_of_the_step() -> None:
    delivery = DeliverySpan(version=4, start_s=START_S - 5.0, end_s=START_S + 4.0)
    trace = make_step(5, 0.0, 8.0).model_copy(update={"deliveries": (delivery,)})
    (chart,) = make_step_charts([trace])
    (bar,) = chart.make_rows()[1].bars
    assert bar.x == chart.scale(START_S)
    assert bar.width == pytest.approx(chart.scale(START_S + 4.0) - bar.x)
    assert bar.tooltip == "delivers version 4: 9.0 s"


def test_a_report_has_the_section_only_if_the_run_has_traces(tmp_path: Path) -> None:
    run_dir = build_run(tmp_path / "demo")
    title = "Who waited for whom"
    assert title not in write_report(run_dir).read_text(encoding="utf-8")
    traces = [make_step(1, 0.0, 8.0, [play(0, 0.0, 8.0)]), make_step(2, 8.0, 12.0)]
    lines = "".join(trace.model_dump_json(exclude_defaults=True) + "\n" for trace in traces)
    (run_dir / TRACE_FILE).write_text(lines, encoding="utf-8")
    page = write_report(run_dir, step=1).read_text(encoding="utf-8")
    assert title in page
    assert "Step 1, 8.0 s" in page
    assert "Step 2" not in page
    ET.fromstring(page.removeprefix("<!doctype html>\n"))
