"""The shipped value sets render to the committed golden files."""

from __future__ import annotations

import pytest

from tests.charts.golden import find_golden_file, make_golden_text
from tests.charts.rendering import ValueSet, render
from tests.charts.value_sets import SHIPPED_SETS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("value_set", SHIPPED_SETS, ids=lambda value_set: value_set.name)
def test_shipped_values_render_to_the_golden_files(value_set: ValueSet) -> None:
    assert find_golden_file(value_set).read_text(encoding="utf-8") == make_golden_text(
        render(value_set)
    ), "run .venv/bin/python -m tests.charts.golden and review the changes"
