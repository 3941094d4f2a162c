"""Writes the golden files: what the shipped value sets are rendered to.

.venv/bin/python -m tests.charts.golden
"""

from __future__ import annotations

from pathlib import Path

from tests.charts.rendering import Rendered, ValueSet, rendered
from tests.charts.value_sets import SHIPPED

FOLDER = Path(__file__).parent / "golden"
GENERATED = ("monitoring/dashboards.yaml", "monitoring/rules.yaml")
"""Templates that copy files which have tests of their own."""


def golden_text(release: Rendered) -> str:
    """What helm wrote, without copies of other files."""
    documents = release.text.split("---\n")
    return "---\n".join(one for one in documents if not _first_line(one).endswith(GENERATED))


def golden_file(chosen: ValueSet) -> Path:
    """Where it is kept."""
    return FOLDER / f"{chosen.name}.yaml"


def _first_line(document: str) -> str:
    return document.partition("\n")[0]


if __name__ == "__main__":
    for one in SHIPPED:
        golden_file(one).write_text(golden_text(rendered(one)), encoding="utf-8")
