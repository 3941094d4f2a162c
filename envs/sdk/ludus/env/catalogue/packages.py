"""Installed environment packages, which are found without importing them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from importlib.metadata import metadata, packages_distributions
from pathlib import Path

from ludus.env.options import EnvironmentOptions

PACKAGE_SUFFIX = "_env"
"""Suffix of the names of environment packages."""


@dataclass(frozen=True, slots=True)
class EnvironmentPackage:
    """An installed environment package."""

    name: str
    version: str
    summary: str


def list_installed_packages() -> list[EnvironmentPackage]:
    """List the installed environment packages by name, without importing them."""
    distributions = packages_distributions()
    names = sorted(
        name for name in distributions if name.endswith(PACKAGE_SUFFIX) and _has_server_app(name)
    )
    return [_describe_package(name, distributions[name][0]) for name in names]


def find_options_type(package: str) -> type[EnvironmentOptions] | None:
    """Return the options model in the module `options` of a package, or None.

    The other modules of the package, and the libraries that only they need, are not imported.
    """
    try:
        module = importlib.import_module(f"{package}.options")
    except ModuleNotFoundError:
        return None
    for _, model in inspect.getmembers(module, inspect.isclass):
        if issubclass(model, EnvironmentOptions) and model.__module__ == module.__name__:
            return model
    return None


def _has_server_app(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / "server" / "app.py").is_file() for folder in folders or ())


def _describe_package(name: str, distribution: str) -> EnvironmentPackage:
    headers = metadata(distribution)
    return EnvironmentPackage(name, headers["Version"], headers["Summary"] or "")
