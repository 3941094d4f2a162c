"""Environment packages, as the command line names and lists them."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import metadata, packages_distributions
from pathlib import Path
from typing import Any

from ludus.proto.errors import ConfigError, NotFoundError

SUFFIX = "_env"
"""Environment packages are called `<something>_env`."""


@dataclass(frozen=True, slots=True)
class EnvironmentPackage:
    """An installed environment package."""

    name: str
    version: str
    summary: str


def installed_packages() -> list[EnvironmentPackage]:
    """The environment packages of this Python, by name; none of them is imported."""
    found = packages_distributions()
    names = sorted(name for name in found if name.endswith(SUFFIX) and _has_server(name))
    return [_describe(name, found[name][0]) for name in names]


def require_package(name: str) -> None:
    """Nothing, where a module of that name can be imported.

    Raises:
        NotFoundError: there is none; the message names what is close.
    """
    try:
        is_there = importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        is_there = False
    if is_there:
        return
    names = [package.name for package in installed_packages()]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"installed: {', '.join(names) or 'none'}"
    raise NotFoundError(f"no environment package '{name}'; {hint}")


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """What `key=value` options say; a value is read as JSON, else as text."""
    parsed: dict[str, Any] = {}
    for option in options:
        key, separator, raw = option.partition("=")
        if not separator or not key.strip():
            raise ConfigError(
                f"--option expected key=value, got '{option}'; for example --option game=blackjack"
            )
        try:
            parsed[key.strip()] = json.loads(raw)
        except json.JSONDecodeError:
            parsed[key.strip()] = raw
    return parsed


def _has_server(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "server" / "app.py").is_file() for place in places or ())


def _describe(name: str, distribution: str) -> EnvironmentPackage:
    about = metadata(distribution)
    return EnvironmentPackage(name, about["Version"], about["Summary"] or "")
