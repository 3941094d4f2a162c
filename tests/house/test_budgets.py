"""Size limits of files, functions, packages and configuration sections."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from ludus.proto.config import RunConfig
from ludus.proto.config.mistakes import find_sections

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_FIELDS = 20
MAX_MODULES = 8
"""Maximum number of modules directly in a package of the SDK or the gateway."""
FORBIDDEN_MODULE_NAMES = {"utils", "util", "common", "helpers", "manager", "misc"}


def list_sources() -> list[Path]:
    """Return the hand-written Python files of the repository."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    paths = [ROOT / name for name in names if "_pb2" not in name]
    return [path for path in paths if path.exists()]


def find_functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a file, including nested functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.slow
def test_no_file_is_longer_than_the_budget() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in list_sources()}
    assert lengths, "git ls-files returned no Python files"
    assert {p: n for p, n in lengths.items() if n > MAX_FILE_LINES} == {}


@pytest.mark.slow
def test_no_function_is_longer_than_the_budget() -> None:
    long_functions = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in list_sources()
        for node in find_functions(path)
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long_functions == []


def list_packages() -> list[Path]:
    """Return the folders of the SDK's and the gateway's packages, without the root folders."""
    roots = (ROOT / "envs/sdk/ludus/env", ROOT / "services/ludus/services/gateway")
    return sorted(
        {path.parent for path in list_sources() for root in roots if root in path.parents}
    )


@pytest.mark.parametrize("package", list_packages(), ids=lambda path: path.name)
def test_every_package_is_small_and_has_a_docstring(package: Path) -> None:
    modules = [path for path in package.glob("*.py") if path.stem not in ("__init__", "__main__")]
    assert len(modules) <= MAX_MODULES
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    assert docstring, f"{package}/__init__.py has no docstring"
    assert docstring.splitlines()[0].endswith(".")


def find_docstrings(path: Path) -> Iterator[str]:
    """Yield every docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


@pytest.mark.slow
def test_docstrings_do_not_open_with_nothing_or_returns_when() -> None:
    production_folders = ("proto", "envs", "services", "trainer")
    findings = [
        f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}"
        for path in list_sources()
        if path.relative_to(ROOT).parts[0] in production_folders
        for docstring in find_docstrings(path)
        if docstring.startswith(("Nothing", "Returns when"))
    ]
    assert findings == [], "docstrings must start with an imperative verb, as in: Open the sinks."


def test_no_module_has_a_catch_all_name() -> None:
    assert [path for path in list_sources() if path.stem in FORBIDDEN_MODULE_NAMES] == []


def collect_sections(annotation: object) -> set[type[BaseModel]]:
    """Return the configuration sections in a type, including nested sections."""
    sections: set[type[BaseModel]] = set()
    for section in find_sections(annotation):
        sections.add(section)
        for field in section.model_fields.values():
            sections |= collect_sections(field.annotation)
    return sections


@pytest.mark.parametrize("section", sorted(collect_sections(RunConfig), key=lambda s: s.__name__))
def test_every_configuration_section_is_small_and_documented(section: type[BaseModel]) -> None:
    fields = section.model_fields
    # Fields of a nested section count toward that section only.
    value_fields = [
        name for name, field in fields.items() if not list(find_sections(field.annotation))
    ]
    assert len(value_fields) <= MAX_FIELDS
    undocumented_fields = [
        name
        for name, field in fields.items()
        if not field.description and name != "kind" and not list(find_sections(field.annotation))
    ]
    assert undocumented_fields == []
    assert section.__doc__
