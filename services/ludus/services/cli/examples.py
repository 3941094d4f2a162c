"""The packaged examples: their configurations, environments and measured results.

ludus.examples/NAME/*.toml   configurations
ludus.examples/results.json  results, written by dev/example_results.py
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ludus.proto.errors import NotFoundError

RESULTS_FILE = "results.json"
_LAPTOP_CONFIGS = ("tiny.toml", "ppo.toml")
"""Names of configurations that train on a laptop. `ludus init` copies the first that exists."""
_METRICS = {
    "win_rate": "share of successes",
    "not_lost": "share of games won or drawn",
    "gap_closed": "share closed of the gap from random to optimal play",
    "mean_return": "mean return",
}
"""Metrics of results, with their names for people."""


@dataclass(frozen=True, slots=True)
class ExampleResult:
    """The results of an example in one environment, one per training seed."""

    metric: str
    values: list[float]
    target: str
    """Condition that each value should meet, for example "at least 0.95"."""
    training_s: list[float]
    command: str
    """Command that measures the results."""

    def describe(self) -> str:
        """Return the results in one line."""
        values_text = ", ".join(f"{value:.4g}" for value in self.values)
        longest_s = max(self.training_s)
        return (
            f"{_METRICS.get(self.metric, self.metric)}: {values_text} (target {self.target},"
            f" at most {longest_s:.0f} s of training; {self.command})"
        )


@dataclass(frozen=True, slots=True)
class Example:
    """A configuration that trains in an environment."""

    path: str
    """File relative to the folder of the examples, for example "catch/tiny.toml"."""
    description: str
    copy_command: str
    """Command that copies the configuration; "" if it needs a model or a GPU."""
    results: list[ExampleResult]
    """Results of the learning proofs; empty if there is none for the example."""


def list_example_folders() -> list[Path]:
    """Return the folder of each packaged example, by name; empty if none is installed."""
    folders: dict[str, Path] = {}
    for location in _list_locations():
        # An editable installation adds a location that does not exist. There, glob finds nothing.
        for path in location.glob("*"):
            if path.is_dir():
                folders.setdefault(path.name, path)
    return [folders[name] for name in sorted(folders)]


def find_laptop_config(folder: Path) -> Path | None:
    """Return the configuration of an example that trains on a laptop, or None."""
    return next((folder / name for name in _LAPTOP_CONFIGS if (folder / name).is_file()), None)


def extract_description(config_text: str) -> str:
    """Return the first sentence of the comment at the start of a configuration."""
    comment = re.match(r"(?:#[^\n]*\n)*", config_text)
    words = re.sub(r"\n?# ?", " ", comment.group() if comment else "").split()
    return re.split(r"(?<=[.:]) ", " ".join(words), maxsplit=1)[0].rstrip(":")


def find_target_examples(catalogue_target: str) -> list[Example]:
    """Return the examples that train in an environment, named as in the catalogue."""
    results = _read_results()
    examples: list[Example] = []
    for folder in list_example_folders():
        for config_path in sorted(folder.glob("*.toml")):
            config_text = config_path.read_text(encoding="utf-8")
            names = list(_find_environments(tomllib.loads(config_text), catalogue_target))
            if not names:
                continue
            path = f"{folder.name}/{config_path.name}"
            measured = results.get(path, {})
            target_results = [measured[name] for name in names if name in measured]
            is_copied = config_path == find_laptop_config(folder)
            copy_command = f"ludus init {folder.name}" if is_copied else ""
            examples.append(
                Example(path, extract_description(config_text), copy_command, target_results)
            )
    return examples


def require_examples() -> list[Path]:
    """Return the folder of each packaged example.

    Raises:
        NotFoundError: the examples are not installed.
    """
    folders = list_example_folders()
    if not folders:
        raise NotFoundError("the examples are not installed; run: pip install ludus")
    return folders


def _list_locations() -> list[Path]:
    spec = find_spec("ludus.examples")
    return [Path(location) for location in spec.submodule_search_locations or ()] if spec else []


def _find_environments(config: dict[str, Any], catalogue_target: str) -> Iterator[str]:
    """Yield the names of a configuration's environments that are the target, "" if unnamed."""
    from ludus.env.catalogue.listing import find_catalogue_target

    sections = {"": config.get("environment"), **(config.get("environments") or {})}
    for name, section in sections.items():
        if not isinstance(section, dict) or "package" not in section:
            continue
        target = find_catalogue_target(section["package"], section.get("options") or {})
        if target == catalogue_target:
            yield name


def _read_results() -> dict[str, dict[str, ExampleResult]]:
    """Return the results by example and name of the environment."""
    results: dict[str, dict[str, ExampleResult]] = {}
    for location in _list_locations():
        path = location / RESULTS_FILE
        for row in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else ():
            example, environment = row.pop("example"), row.pop("environment")
            results.setdefault(example, {}).setdefault(environment, ExampleResult(**row))
    return results
