"""The names in docs/tour.md exist, and each nested name is called by the name above it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs" / "tour.md"
AGENTS = ROOT / "AGENTS.md"
MAX_LINES = 120
_LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<path>[^)]+)\)")
_ITEM = re.compile(r"(?P<indent> *)(?:-|\d+\.) ")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Stop:
    """A name that the tour links, and the caller above it."""

    name: str
    path: Path
    caller: Stop | None

    def __str__(self) -> str:
        return f"{self.path.stem}.{self.name}"


@functools.cache
def parse_source(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def find_definition(stop: Stop) -> Definition | None:
    """Return the definition of a name, or None if it is not defined."""
    scope: ast.Module | Definition = parse_source(stop.path)
    for part in stop.name.split("."):
        definitions = (n for n in scope.body if isinstance(n, Definition) and n.name == part)
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


def list_stops() -> Iterator[Stop]:
    """Yield the linked names in order; the first name of an item calls the nested names."""
    callers: list[tuple[int, Stop]] = []
    for line in TOUR.read_text(encoding="utf-8").splitlines():
        item = _ITEM.match(line)
        if not line.strip() or line.startswith("#"):
            callers = []
        indent = len(item["indent"]) if item else None
        if indent is not None:
            callers = [(depth, stop) for depth, stop in callers if depth < indent]
        for index, link in enumerate(_LINK.finditer(line)):
            caller = callers[-1][1] if item and index == 0 and callers else None
            stop = Stop(link["name"], (TOUR.parent / link["path"]).resolve(), caller)
            if indent is not None and index == 0:
                callers.append((indent, stop))
            yield stop


STOPS = list(list_stops())


def test_the_tour_is_short_and_covers_the_system() -> None:
    assert len(TOUR.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    assert len(STOPS) >= 40
    assert sum(stop.caller is not None for stop in STOPS) >= 20


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_tour_names_are_defined_in_the_linked_file(stop: Stop) -> None:
    assert stop.path.is_file(), f"{stop.path} is not there"
    assert find_definition(stop) is not None, f"{stop.path} does not define {stop.name}"


@pytest.mark.parametrize("stop", [stop for stop in STOPS if stop.caller is not None], ids=str)
def test_nested_tour_names_are_called_by_the_parent(stop: Stop) -> None:
    assert stop.caller is not None
    caller = find_definition(stop.caller)
    assert caller is not None
    names = stop.name.removesuffix(".__call__").removesuffix(".__init__").split(".")
    assert list_used_names(caller) & {names[-1], names[0]}, f"{stop.caller} does not use {stop}"


def test_every_path_of_the_map_exists() -> None:
    paths = re.findall(r"`([\w/]+/ludus/[\w/.]+)`", AGENTS.read_text("utf-8"))
    assert len(paths) >= 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
