"""The registry of prefixes: entry points of the group `ludus.targets` of installed packages.

entry point "openspiel" --find_source--> TargetSource --make_builder--> environments
"""

from __future__ import annotations

import functools
import inspect
from importlib.metadata import EntryPoint, entry_points

from ludus.env.catalogue.sources import TargetSource
from ludus.proto.errors import ConfigError, LudusError, describe_code_error

GROUP = "ludus.targets"
"""Group of the entry points."""
_OWN_ENTRY_POINTS = (
    EntryPoint("gymnasium", "ludus.env.catalogue.gymnasium_ids:GymnasiumTargets", GROUP),
    EntryPoint("openenv", "ludus.env.catalogue.openenv_classes:OpenEnvTargets", GROUP),
)
"""Entry points of this package, for an interpreter that finds its modules but no metadata."""


def list_prefixes() -> list[str]:
    """Return the prefixes of all installed packages."""
    return sorted(_find_entry_points())


@functools.cache
def find_source(prefix: str) -> TargetSource | None:
    """Return the source of a prefix, or None if no installed package declares the prefix.

    Raises:
        ConfigError: several packages declare the prefix, or its source cannot be loaded.
    """
    declarations = _find_entry_points().get(prefix, [])
    if not declarations:
        return None
    packages = " and ".join(map(_name_package, declarations))
    if len(declarations) > 1:
        raise ConfigError(
            f"the packages {packages} both declare the prefix '{prefix}' of targets; uninstall one"
        )
    try:
        source = declarations[0].load()
        if inspect.isclass(source):
            source = source()
    except LudusError:
        raise
    except Exception as error:  # third-party code
        raise ConfigError(
            f"the prefix '{prefix}' of the package {packages} cannot be loaded: "
            f"{describe_code_error(error)}; update or uninstall the package"
        ) from error
    if not isinstance(source, TargetSource):
        raise ConfigError(
            f"the prefix '{prefix}' of the package {packages} must name a"
            f" ludus.env.catalogue.sources.TargetSource, got {source!r}"
        )
    return source


@functools.cache
def _find_entry_points() -> dict[str, list[EntryPoint]]:
    points_by_prefix: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=GROUP):
        points_by_prefix.setdefault(entry_point.name, []).append(entry_point)
    for entry_point in _OWN_ENTRY_POINTS:
        points_by_prefix.setdefault(entry_point.name, [entry_point])
    return points_by_prefix


def _name_package(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else entry_point.value
