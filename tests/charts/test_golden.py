"""The shipped value sets render to the committed golden files."""

from __future__ import annotations

import pytest

from tests.charts.golden import golden_file, golden_text
from tests.charts.rendering import ValueSet, render
from tests.charts.value_sets import SHIPPED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("chosen", SHIPPED, ids=lambda value_set: value_set.name)
def test_shipped_values_render_to_the_golden_files(chosen: ValueSet) -> None:
    assert golden_file(chosen).read_text(encoding="utf-8") == golden_text(render(chosen)), (
        "run .venv/bin/python -m tests.charts.golden, and look at what git says changed"
    )
