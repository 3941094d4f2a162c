"""The former place of `targets`."""

from __future__ import annotations

from ludus.env.targets import (
    EnvironmentPackage,
    environment_factory,
    installed_packages,
    require_package,
)

__all__ = ["EnvironmentPackage", "environment_factory", "installed_packages", "require_package"]
