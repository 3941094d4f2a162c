"""docs/variables.md lists every environment variable that the code reads or sets by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE_TEXT = (ROOT / "docs" / "variables.md").read_text(encoding="utf-8")
FOLDERS = ("proto", "envs", "services", "trainer")
PRIVATE_VARIABLES = {"TMPDIR", "TEMP", "TMP", "HOME"}
"""Variables that a worker sets to its own folder."""


def find_modules() -> Iterator[ast.Module]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) and "build" not in path.parts:
                yield ast.parse(path.read_text(encoding="utf-8"))


def find_constants(module: ast.Module) -> dict[str, str]:
    """Return the module's constants whose values are texts."""
    return {
        node.targets[0].id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def find_keys(module: ast.Module) -> Iterator[ast.AST]:
    """Yield the expressions with which the module accesses a single environment variable."""
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(value=value), args=[key, *_]) if is_environ(value):
                yield key
            case ast.Subscript(value=value, slice=key) if is_environ(value):
                yield key
            case ast.Compare(key, _, [value]) if is_environ(value):
                yield key


def find_names() -> set[str]:
    modules = list(find_modules())
    all_constants: dict[str, str] = {}
    for module in modules:
        all_constants |= find_constants(module)
    names = set()
    for module in modules:
        constants = all_constants | find_constants(module)
        for key in find_keys(module):
            if isinstance(key, ast.Name) and key.id in constants:
                names.add(constants[key.id])
            elif isinstance(key, ast.Constant):
                names.add(key.value)
    return names


def test_page_lists_every_variable() -> None:
    names = find_names() - PRIVATE_VARIABLES
    assert {"LUDUS_ENV_TOKEN", "RAY_ADDRESS", "HF_ENDPOINT", "POD_UID"} <= names
    assert not sorted(name for name in names if f"`{name}`" not in PAGE_TEXT)


def test_code_contains_every_listed_variable() -> None:
    pages = PAGE_TEXT.partition("## Options of environments")[0]
    listed_names = set(re.findall(r"`((?:LUDUS|OPENENV)_[A-Z_]+)`", pages))
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert not sorted(name for name in listed_names if f'"{name}"' not in code)
