"""The checker of test durations."""

from __future__ import annotations

from pathlib import Path

import pytest
from durations import find_slowed, find_unrecorded, measure_slowdown, read_report


def test_report_reader_ignores_skipped_tests(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="suite.test_a" name="test_x[1]" time="4.5"/>'
        '<testcase classname="suite.test_a" name="test_y" time="1"><skipped/></testcase>'
        "</testsuite></testsuites>",
        encoding="utf-8",
    )
    assert read_report(report) == {"suite/test_a.py::test_x[1]": 4.5}


def test_slowdown_by_more_than_half_is_reported() -> None:
    old_durations = {"a": 40.0, "b": 40.0, "c": 40.0}
    assert find_slowed({"a": 59.9, "b": 60.1, "c": 39.0}, old_durations, 1.0) == {"b": 60.0}


def test_short_test_slowdown_above_ten_seconds_is_reported() -> None:
    old_durations = {"a": 4.0, "b": 4.0}
    assert find_slowed({"a": 13.9, "b": 14.1}, old_durations, 1.0) == {"b": 14.0}


def test_limits_scale_with_the_speed_of_the_machine() -> None:
    old_durations = {"a": 10.0, "b": 10.0, "c": 10.0}
    durations = {"a": 20.0, "b": 21.0, "c": 42.0}
    slowdown = measure_slowdown(durations, old_durations)
    assert slowdown == pytest.approx(2.1)
    assert list(find_slowed(durations, old_durations, slowdown)) == ["c"]


def test_a_faster_machine_does_not_tighten_the_limits() -> None:
    assert measure_slowdown({"a": 5.0}, {"a": 10.0}) == 1.0


def test_slow_test_without_a_record_is_reported() -> None:
    durations = {"new": 31.0, "short": 5.0}
    assert find_unrecorded(durations, {}) == ["new"] and not find_slowed(durations, {}, 1.0)
