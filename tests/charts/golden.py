"""Writer of the golden files, which contain the rendered text of the shipped value sets.

.venv/bin/python -m tests.charts.golden
"""

from __future__ import annotations

from pathlib import Path

from tests.charts.rendering import RenderedRelease, ValueSet, render
from tests.charts.value_sets import SHIPPED_SETS

FOLDER = Path(__file__).parent / "golden"
COPIED_FILES = ("monitoring/dashboards.yaml", "monitoring/rules.yaml")
"""Templates that copy files. Other tests cover these files."""


def make_golden_text(release: RenderedRelease) -> str:
    """Return helm's output without the documents that copy other files."""
    documents = release.text.split("---\n")
    return "---\n".join(
        document for document in documents if not _read_first_line(document).endswith(COPIED_FILES)
    )


def find_golden_file(value_set: ValueSet) -> Path:
    """Return the path of the golden file of a value set."""
    return FOLDER / f"{value_set.name}.yaml"


def _read_first_line(document: str) -> str:
    return document.partition("\n")[0]


if __name__ == "__main__":
    for value_set in SHIPPED_SETS:
        find_golden_file(value_set).write_text(
            make_golden_text(render(value_set)), encoding="utf-8"
        )
