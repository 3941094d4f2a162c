"""The shipped value sets are rendered to what was looked at when it was committed."""

from __future__ import annotations

import pytest

from tests.charts.golden import golden_file, golden_text
from tests.charts.rendering import ValueSet, rendered
from tests.charts.value_sets import SHIPPED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("chosen", SHIPPED, ids=lambda one: one.name)
def test_the_shipped_values_give_what_was_looked_at(chosen: ValueSet) -> None:
    assert golden_file(chosen).read_text(encoding="utf-8") == golden_text(rendered(chosen)), (
        "run .venv/bin/python -m tests.charts.golden, and look at what git says changed"
    )
