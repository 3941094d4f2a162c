"""Consistency of docs/tour.md with the code: definitions and calls of the linked names."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR_PATH = ROOT / "docs" / "tour.md"
AGENTS_PATH = ROOT / "AGENTS.md"
MAX_TOUR_LINES = 120
_LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<path>[^)]+)\)")
_ITEM = re.compile(r"(?P<indent> *)(?:-|\d+\.) ")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class TourLink:
    """A link of the tour, and the link whose definition calls the linked name."""

    name: str
    path: Path
    caller: TourLink | None

    def __str__(self) -> str:
        return f"{self.path.stem}.{self.name}"


@functools.cache
def parse_source(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def find_definition(tour_link: TourLink) -> Definition | None:
    """Return the definition of a name, or None if it is not defined."""
    scope: ast.Module | Definition = parse_source(tour_link.path)
    for name in tour_link.name.split("."):
        definitions = (n for n in scope.body if isinstance(n, Definition) and n.name == name)
        definition = next(definitions, None)
        if definition is None:
            return None
        scope = definition
    return scope if isinstance(scope, Definition) else None


def list_used_names(definition: Definition) -> set[str]:
    """Return every name and attribute that the definition uses."""
    nodes = list(ast.walk(definition))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


def list_tour_links() -> Iterator[TourLink]:
    """Yield the links in order; the first link of a list item is the caller of nested items."""
    callers: list[tuple[int, TourLink]] = []
    for line in TOUR_PATH.read_text(encoding="utf-8").splitlines():
        item = _ITEM.match(line)
        if not line.strip() or line.startswith("#"):
            callers = []
        indent = len(item["indent"]) if item else None
        if indent is not None:
            callers = [(depth, tour_link) for depth, tour_link in callers if depth < indent]
        for index, match in enumerate(_LINK.finditer(line)):
            caller = callers[-1][1] if item and index == 0 and callers else None
            tour_link = TourLink(
                match["name"], (TOUR_PATH.parent / match["path"]).resolve(), caller
            )
            if indent is not None and index == 0:
                callers.append((indent, tour_link))
            yield tour_link


TOUR_LINKS = list(list_tour_links())


def test_the_tour_is_short_and_covers_the_system() -> None:
    assert len(TOUR_PATH.read_text(encoding="utf-8").splitlines()) <= MAX_TOUR_LINES
    assert len(TOUR_LINKS) >= 40
    assert sum(tour_link.caller is not None for tour_link in TOUR_LINKS) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("tour_link", TOUR_LINKS, ids=str)
def test_tour_names_are_defined_in_the_linked_file(tour_link: TourLink) -> None:
    assert tour_link.path.is_file(), f"{tour_link.path} does not exist"
    assert find_definition(tour_link) is not None, (
        f"{tour_link.path} does not define {tour_link.name}"
    )


@pytest.mark.parametrize(
    "tour_link", [tour_link for tour_link in TOUR_LINKS if tour_link.caller is not None], ids=str
)
def test_nested_tour_names_are_used_by_their_parent_definition(tour_link: TourLink) -> None:
    assert tour_link.caller is not None
    caller = find_definition(tour_link.caller)
    assert caller is not None
    names = tour_link.name.removesuffix(".__call__").removesuffix(".__init__").split(".")
    assert list_used_names(caller) & {names[-1], names[0]}, (
        f"{tour_link.caller} does not use {tour_link}"
    )


def test_every_path_in_agents_md_exists() -> None:
    paths = re.findall(r"`([\w/]+/ludus/[\w/.]+)`", AGENTS_PATH.read_text("utf-8"))
    assert len(paths) >= 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
