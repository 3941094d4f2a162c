"""docs/tour.md tells the truth: its names are there, and what stands under one is called by it."""

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
    """A name that the tour links, and the one that it stands under."""

    name: str
    path: Path
    caller: Stop | None

    def __str__(self) -> str:
        return f"{self.path.stem}.{self.name}"


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def definition_of(stop: Stop) -> Definition | None:
    """Where the name is defined; None where it is not."""
    scope: ast.Module | Definition = parsed(stop.path)
    for part in stop.name.split("."):
        named = (n for n in scope.body if isinstance(n, Definition) and n.name == part)
        found = next(named, None)
        if found is None:
            return None
        scope = found
    return scope if isinstance(scope, Definition) else None


def mentioned_in(definition: Definition) -> set[str]:
    """Every name and attribute that the definition uses."""
    nodes = list(ast.walk(definition))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {
        n.attr for n in nodes if isinstance(n, ast.Attribute)
    }


def stops() -> Iterator[Stop]:
    """The linked names in their order; the first of an item is the caller of those under it."""
    callers: list[tuple[int, Stop]] = []
    for line in TOUR.read_text(encoding="utf-8").splitlines():
        item = _ITEM.match(line)
        if not line.strip() or line.startswith("#"):
            callers = []
        indent = len(item["indent"]) if item else None
        if indent is not None:
            callers = [(depth, stop) for depth, stop in callers if depth < indent]
        for number, link in enumerate(_LINK.finditer(line)):
            caller = callers[-1][1] if item and number == 0 and callers else None
            stop = Stop(link["name"], (TOUR.parent / link["path"]).resolve(), caller)
            if indent is not None and number == 0:
                callers.append((indent, stop))
            yield stop


STOPS = list(stops())


def test_the_tour_is_short_and_goes_far() -> None:
    assert len(TOUR.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    assert len(STOPS) >= 40
    assert sum(stop.caller is not None for stop in STOPS) >= 20


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_name_of_the_tour_is_defined_where_the_tour_says(stop: Stop) -> None:
    assert stop.path.is_file(), f"{stop.path} is not there"
    assert definition_of(stop) is not None, f"{stop.path} does not define {stop.name}"


@pytest.mark.parametrize("stop", [s for s in STOPS if s.caller is not None], ids=str)
def test_what_stands_under_a_name_of_the_tour_is_called_by_it(stop: Stop) -> None:
    assert stop.caller is not None
    caller = definition_of(stop.caller)
    assert caller is not None
    called = stop.name.removesuffix(".__call__").removesuffix(".__init__").split(".")
    assert mentioned_in(caller) & {called[-1], called[0]}, f"{stop.caller} does not use {stop}"


def test_every_path_of_the_map_is_there() -> None:
    named = re.findall(r"`([\w/]+/ludus/[\w/.]+)`", AGENTS.read_text("utf-8"))
    assert len(named) >= 15
    assert [path for path in named if not (ROOT / path).exists()] == []
