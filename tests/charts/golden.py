"""Writer of the golden files: the rendered text of the shipped value sets.

.venv/bin/python -m tests.charts.golden
"""

from __future__ import annotations

from pathlib import Path

from tests.charts.rendering import Rendered, ValueSet, render
from tests.charts.value_sets import SHIPPED

FOLDER = Path(__file__).parent / "golden"
GENERATED = ("monitoring/dashboards.yaml", "monitoring/rules.yaml")
"""Templates that copy files which other tests cover."""


def golden_text(release: Rendered) -> str:
    """Return helm's output without the documents that copy other files."""
    documents = release.text.split("---\n")
    return "---\n".join(
        document for document in documents if not _first_line(document).endswith(GENERATED)
    )


def golden_file(chosen: ValueSet) -> Path:
    """Return the path of the golden file of a value set."""
    return FOLDER / f"{chosen.name}.yaml"


def _first_line(document: str) -> str:
    return document.partition("\n")[0]


if __name__ == "__main__":
    for chosen_set in SHIPPED:
        golden_file(chosen_set).write_text(golden_text(render(chosen_set)), encoding="utf-8")
