"""Environment packages by name: modules that end in `_env` and have `make_environment`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import metadata, packages_distributions
from pathlib import Path

from ludus.env.environment import AnyEnvironment
from ludus.env.types import JsonObject
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


def environment_factory(package: str, options: JsonObject) -> Callable[[], AnyEnvironment]:
    """What makes one environment of an installed package, built with `options`.

    Raises:
        NotFoundError: no such package.
        ConfigError: it is no environment package.
    """
    require_package(package)
    make: Callable[..., AnyEnvironment] | None
    make = getattr(importlib.import_module(package), "make_environment", None)
    if make is None:
        raise ConfigError(
            f"'{package}' has no make_environment(**options); name an environment package"
        )
    return partial(_make, package, make, options)


def _make(package: str, make: Callable[..., AnyEnvironment], options: JsonObject) -> AnyEnvironment:
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(
            f"environment package '{package}' cannot be built with {options}: {error}"
        ) from error


def _has_server(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "server" / "app.py").is_file() for place in places or ())


def _describe(name: str, distribution: str) -> EnvironmentPackage:
    about = metadata(distribution)
    return EnvironmentPackage(name, about["Version"], about["Summary"] or "")
