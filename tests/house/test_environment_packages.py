"""Rules for all environment packages in envs/."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from option_tables import find_option_models, render_readme

from ludus.env.options import EnvironmentOptions

ROOT = Path(__file__).parents[2]
PACKAGE_NAMES = {folder.name for folder in ROOT.glob("envs/*_env")}
PRODUCTION_FOLDERS = ("proto", "envs", "services", "trainer")


def find_imports(path: Path) -> Iterator[str]:
    """Yield the top-level name of each absolute import of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.slow
@pytest.mark.parametrize("folder_name", PRODUCTION_FOLDERS)
def test_no_production_code_imports_an_environment(folder_name: str) -> None:
    """Find absolute imports of `NAME_env`; the import linter finds only `envs.NAME_env`."""
    importing_paths = {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder_name).rglob("*.py")
        if PACKAGE_NAMES.intersection(find_imports(path))
    }
    assert not importing_paths


@pytest.mark.parametrize(
    ("readme", "options_type"),
    list(find_option_models()),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_readme_has_the_current_option_table(
    readme: Path, options_type: type[EnvironmentOptions]
) -> None:
    text = readme.read_text(encoding="utf-8")
    assert render_readme(text, options_type) == text, "run dev/option_tables.py"


@pytest.mark.parametrize("name", sorted(PACKAGE_NAMES))
def test_modules_in_the_readme_are_those_of_the_installed_package(name: str) -> None:
    """The folder `envs` is a package in the root of a checkout only."""
    text = (ROOT / "envs" / name / "README.md").read_text(encoding="utf-8")
    modules = re.findall(r"^(?:\w+=\S+ )?python -m (\S+)", text, re.MULTILINE)
    modules += re.findall(r"^from (\S+) import", text, re.MULTILINE)
    assert not [module for module in modules if module.startswith("envs.")]
    for names in re.findall(rf"^from {name} import (.+)$", text, re.MULTILINE):
        assert set(names.split(", ")) <= set(importlib.import_module(name).__all__)
