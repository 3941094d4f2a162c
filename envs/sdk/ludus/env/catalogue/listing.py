"""The catalogue: all environments that can be named without writing code.

    entry points       --> TargetSource.list_environments --+
    installed packages --> list_installed_packages ---------+--> Catalogue

A source whose package is missing or fails adds a note instead of entries.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ludus.env.catalogue.packages import PACKAGE_SUFFIX, list_installed_packages
from ludus.env.catalogue.registry import find_source, list_prefixes
from ludus.env.catalogue.sources import CatalogueEntry, PackageTargets, TargetSource
from ludus.proto.errors import ConfigError, LudusError, describe_code_error

PACKAGES_FAMILY = "packages"
"""Family of the environment packages themselves."""
_MIN_SIMILARITY = 0.7
"""Smallest similarity of a name that is suggested, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The entries of all installed packages."""

    entries: list[CatalogueEntry]
    """Entries by family and target."""
    notes: list[str]
    """Reasons why a prefix has no entries, with the remedy."""


def read_catalogue() -> Catalogue:
    """Return the catalogue of all prefixes and environment packages."""
    entries, notes = list(_list_packages()), []
    for prefix in list_prefixes():
        try:
            source = find_source(prefix)
            entries += _list_entries(prefix, source) if source is not None else ()
        except LudusError as error:
            notes.append(f"{prefix}: {error}")
        except Exception as error:  # noqa: BLE001 - third-party code
            notes.append(f"{prefix}: the catalogue cannot be read: {describe_code_error(error)}")
    return Catalogue(sorted(entries, key=lambda entry: (entry.family, entry.target)), notes)


def find_catalogue_target(target: str, options: Mapping[str, Any]) -> str:
    """Return the target under which the catalogue lists an environment.

    It is "openspiel:chess" for `openspiel_env` with `game = "chess"`.
    """
    for prefix, source in _list_sources():
        if isinstance(source, PackageTargets) and source.package == target:
            return f"{prefix}:{options.get(source.option) or source.default_name}"
    return target


def find_entry(target: str) -> CatalogueEntry | None:
    """Return the entry of a target, or None if the catalogue does not contain the target."""
    prefix, _, name = target.partition(":")
    if not name:
        return next((entry for entry in _list_packages() if entry.name == target), None)
    for source_prefix, source in _list_sources():
        if source_prefix == prefix:
            entries = _list_entries(prefix, source)
            return next((entry for entry in entries if entry.name == name), None)
    return None


def suggest_targets(name: str, entries: Iterable[CatalogueEntry]) -> str:
    """Return a hint at the targets that are most similar to a name; "" if none is similar.

    The name may have no prefix, or a wrong prefix.
    """
    targets_by_name: dict[str, list[str]] = {}
    for entry in entries:
        short_name = entry.name.rpartition("/")[2].removesuffix(PACKAGE_SUFFIX)
        for alias in (entry.target, entry.name, short_name):
            targets_by_name.setdefault(alias.casefold(), []).append(entry.target)
    folded_name = name.casefold()
    matches: list[str] = []
    for alias in dict.fromkeys((folded_name, folded_name.partition(":")[2] or folded_name)):
        similar_names = difflib.get_close_matches(
            alias, targets_by_name, n=3, cutoff=_MIN_SIMILARITY
        )
        matches += [target for match in similar_names for target in targets_by_name[match]]
    targets = list(dict.fromkeys(matches))[:3]
    return f"did you mean {' or '.join(repr(target) for target in targets)}?" if targets else ""


def _list_packages() -> Iterator[CatalogueEntry]:
    for package in list_installed_packages():
        yield CatalogueEntry(package.name, package.summary, PACKAGES_FAMILY, "readable")


def _list_sources() -> Iterator[tuple[str, TargetSource]]:
    """Yield the sources that can be loaded, with their prefixes."""
    for prefix in list_prefixes():
        with contextlib.suppress(ConfigError):
            source = find_source(prefix)
            if source is not None:
                yield prefix, source


def _list_entries(prefix: str, source: TargetSource) -> list[CatalogueEntry]:
    return [replace(entry, prefix=prefix) for entry in source.list_environments()]
