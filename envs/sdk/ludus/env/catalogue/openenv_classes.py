"""The prefix `openenv`: classes and applications written for OpenEnv."""

from __future__ import annotations

from ludus.env.adapters import OPENENV
from ludus.env.catalogue.importing import load_object
from ludus.env.catalogue.sources import TargetSource
from ludus.env.environment import Builder


class OpenEnvTargets(TargetSource):
    """Any class or application of OpenEnv, by its module and name."""

    def make_builder(self, name: str) -> Builder:
        """Return a function that makes environments of the class or application `module:NAME`."""
        from ludus.env.adapters.openenv.environment import make_openenv_builder

        target = f"{OPENENV}:{name}"
        return make_openenv_builder(target, load_object(target, name))
