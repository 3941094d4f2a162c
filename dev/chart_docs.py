"""Writes docs/kubernetes-values.md from the chart's values.yaml and its comments, or checks it.

Each value stands under a comment of its own. What a comment describes as a whole (requests and
limits, lists of rules) is one row.
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
VALUES = ROOT / "charts" / "ludus" / "values.yaml"
TARGET = ROOT / "docs" / "kubernetes-values.md"
INTRODUCTION = """# Values of the chart

Every value of `charts/ludus` with its default. `values.schema.json` holds types and bounds; helm
refuses what it does not know. `environmentDefaults` are what each entry of `environments` is
unless it says otherwise: `environments.blackjack.capacity` replaces
`environmentDefaults.capacity`. [kubernetes.md](kubernetes.md) says how they work together.

This page is generated: `.venv/bin/python dev/chart_docs.py`.
"""
_LINE = re.compile(r"^( *)([A-Za-z0-9]+):(?: |$)")


@dataclass(frozen=True)
class Described:
    """A key with the comment above it."""

    path: tuple[str, ...]
    comment: str


def described(text: str) -> Iterator[Described]:
    """The keys that have a comment, in their order.

    Raises:
        ValueError: a key has none, and no comment above it covers it.
    """
    comment: list[str] = []
    path: list[tuple[int, str]] = []
    covered = -1
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip("# ").rstrip())
            continue
        found = _LINE.match(line)
        if found is None:
            comment = [] if not line.strip() else comment
            continue
        depth = len(found[1])
        path = [*((indent, key) for indent, key in path if indent < depth), (depth, found[2])]
        if comment:
            covered = depth
            yield Described(tuple(key for _, key in path), " ".join(comment))
        elif depth <= covered:
            raise ValueError(f"values.yaml:{number}: {found[2]} has no comment")
        comment = []


def value_of(values: dict[str, Any], path: tuple[str, ...]) -> Any:
    """The value at the path."""
    found: Any = values
    for key in path:
        found = found[key]
    return found


def page() -> str:
    """The whole page."""
    text = VALUES.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    keys = list(described(text))
    above = {one.path[:-1] for one in keys}
    lines = [INTRODUCTION]
    for one in keys:
        if len(one.path) == 1:
            lines.append(f"\n## {one.path[0]}\n\n{one.comment}\n")
            if one.path in above:
                lines.append("\n| value | default | |\n|---|---|---|\n")
                continue
            lines.append(f"\nDefault: `{_shown(value_of(values, one.path))}`\n")
        elif one.path in above:
            lines.append(f"| `{'.'.join(one.path)}` | | {one.comment} |\n")
        else:
            shown = _shown(value_of(values, one.path))
            lines.append(f"| `{'.'.join(one.path)}` | `{shown}` | {one.comment} |\n")
    return "".join(lines)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("|", "\\|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on drift")
    if not parser.parse_args().check:
        TARGET.write_text(page(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != page():
        sys.exit("docs/kubernetes-values.md is stale; run dev/chart_docs.py")
