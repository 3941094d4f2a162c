"""Write docs/kubernetes-values.md from the comments in the chart's values.yaml, or check it.

Each value has a comment above it. A value without comments inside, such as requests and limits, is
one row.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
VALUES_FILE = ROOT / "charts" / "ludus" / "values.yaml"
TARGET = ROOT / "docs" / "kubernetes-values.md"
INTRODUCTION = """# Values of the chart

All values of `charts/ludus` with their defaults. `values.schema.json` contains types and bounds;
helm refuses unknown values. `environmentDefaults` are the defaults of each entry of
`environments`: for example, `environments.blackjack.capacity` replaces
`environmentDefaults.capacity`. [kubernetes.md](kubernetes.md) explains the values.

This page is generated: `.venv/bin/python dev/chart_docs.py`.
"""
_KEY_PATTERN = re.compile(r"^( *)([A-Za-z0-9]+):(?: |$)")


@dataclass(frozen=True)
class CommentedKey:
    """A key and the comment above it."""

    path: tuple[str, ...]
    comment: str


def read_keys(text: str) -> Iterator[CommentedKey]:
    """Yield the keys with comments in order.

    Raises:
        ValueError: a key has no comment, and no comment of a parent covers it.
    """
    comment: list[str] = []
    path: list[tuple[int, str]] = []
    covered_indent = -1
    for line_number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip("# ").rstrip())
            continue
        match = _KEY_PATTERN.match(line)
        if match is None:
            comment = [] if not line.strip() else comment
            continue
        column = len(match[1])
        path = [*((indent, key) for indent, key in path if indent < column), (column, match[2])]
        if comment:
            covered_indent = column
            yield CommentedKey(tuple(key for _, key in path), " ".join(comment))
        elif column <= covered_indent:
            raise ValueError(f"values.yaml:{line_number}: {match[2]} has no comment")
        comment = []


def find_value(values: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Return the value at a path."""
    value: Any = values
    for key in path:
        value = value[key]
    return value


def render_page() -> str:
    """Return the whole page."""
    text = VALUES_FILE.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    keys = list(read_keys(text))
    parent_paths = {entry.path[:-1] for entry in keys}
    lines = [INTRODUCTION]
    for entry in keys:
        if len(entry.path) == 1:
            lines.append(f"\n## {entry.path[0]}\n\n{entry.comment}\n")
            if entry.path in parent_paths:
                lines.append("\n| value | default | |\n|---|---|---|\n")
                continue
            lines.append(f"\nDefault: `{_to_json(find_value(values, entry.path))}`\n")
        elif entry.path in parent_paths:
            lines.append(f"| `{'.'.join(entry.path)}` | | {entry.comment} |\n")
        else:
            default = _to_json(find_value(values, entry.path))
            lines.append(f"| `{'.'.join(entry.path)}` | `{default}` | {entry.comment} |\n")
    return "".join(lines)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("|", "\\|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; exit with 1 if the page differs."
    )
    if not parser.parse_args().check:
        TARGET.write_text(render_page(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != render_page():
        sys.exit("docs/kubernetes-values.md is stale; run dev/chart_docs.py")
