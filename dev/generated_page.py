"""A page of the documentation that a script generates, and the check that it is current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def write_or_check_page(name: str, text: str) -> None:
    """Write a page of docs/; with the option --check, exit with an error if the page differs."""
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(description=f"Write docs/{name}, or check it.")
    parser.add_argument("--check", action="store_true", help="Do not write; fail on differences.")
    target = DOCS / name
    if not parser.parse_args().check:
        target.write_text(text, encoding="utf-8")
    elif not target.is_file() or target.read_text(encoding="utf-8") != text:
        sys.exit(f"docs/{name} is out of date; run dev/{script}")


def make_table(*rows: tuple[str, ...]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = (f"| {' | '.join(row)} |\n" for row in rows)
    return "".join([head, f"|{'---|' * len(rows[0])}\n", *body])


def escape_cell(text: str) -> str:
    """Return a text for a cell of a table: one line, without cell borders."""
    return " ".join(text.split()).replace("|", "\\|")
