"""Tests of the number formats and line charts of reports."""

from __future__ import annotations

import pytest

from ludus.services.numbers import (
    format_axis_count,
    format_compact,
    format_duration,
    format_fixed,
    format_percent,
    format_percent_interval,
    format_size,
)
from ludus.services.report.line_chart import Scale, choose_ticks, pad_range, spread_positions


@pytest.mark.parametrize(
    ("low", "high", "num_ticks", "expected"),
    [
        (0, 60_000, 6, [0, 10_000, 20_000, 30_000, 40_000, 50_000, 60_000]),
        (0.27, 0.46, 5, [0.3, 0.35, 0.4, 0.45]),
        (-0.43, 0.01, 4, [-0.4, -0.2, 0.0]),
        (0, 3e-8, 3, [0, 1e-8, 2e-8, 3e-8]),
    ],
)
def test_ticks_are_round_and_within_the_range(
    low: float, high: float, num_ticks: int, expected: list[float]
) -> None:
    assert choose_ticks(low, high, num_ticks) == pytest.approx(expected, abs=1e-12)


def test_scale_maps_domain_ends_to_range_ends() -> None:
    scale = Scale(-1.0, 3.0, 200.0, 0.0)
    assert [scale(-1.0), scale(1.0), scale(3.0)] == [200.0, 100.0, 0.0]


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-2.0], [1e-9, 1e-9]])
def test_a_padded_range_is_never_empty(values: list[float]) -> None:
    low, high = pad_range(values)
    assert low < high
    assert all(low <= value <= high for value in values)


def test_labels_are_spread_minimally_and_stay_within_the_range() -> None:
    assert spread_positions([10, 40, 90], 15, 0, 100) == [10, 40, 90]
    positions = spread_positions([50, 52, 51], 15, 0, 100)
    assert sorted(positions) == [50, 65, 80]
    # The positions have the same order as the values.
    assert positions[0] < positions[2] < positions[1]
    assert spread_positions([95, 97], 15, 0, 100) == [85, 100]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.2e-7, "1.2×10⁻⁷"),
        (-3e-5, "−3×10⁻⁵"),
        (0.0456, "0.046"),
        (2.5, "2.5"),
        (999.6, "1,000"),
        (2345.0, "2,345"),
        (12_345, "12.3k"),
        (2_500_000, "2.5M"),
    ],
)
def test_compact_numbers_have_about_three_digits(value: float, text: str) -> None:
    assert format_compact(value) == text


def test_numbers_are_formatted_for_readers() -> None:
    assert format_percent(0.42857) == "42.9%"
    assert format_percent_interval((0.4191, 0.4385)) == "41.9 to 43.9%"
    assert format_fixed(-0.0001, 3) == "0.000"
    assert format_fixed(-0.3976, 3) == "−0.398"
    assert [format_axis_count(value, 20_000) for value in (0, 5000, 20_000)] == ["0", "5k", "20k"]
    assert [format_duration(seconds) for seconds in (8.41, 94, 750, 12_000)] == [
        "8.4 s",
        "94 s",
        "12 min 30 s",
        "3 h 20 min",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (5600, "5.6 kB"), (2_152_000_000, "2.15 GB")],
)
def test_sizes_have_about_three_digits(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text
