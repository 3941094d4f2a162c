"""The prefix `gymnasium`: all ids of `gymnasium.make`, and a catalogue of Gymnasium's own ids.

    gymnasium.registry --newest version of each id--> CatalogueEntry

Ids that another module registers have the form `gymnasium:MODULE:ID`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env.adapters import GYMNASIUM
from ludus.env.adapters.gymnasium.guides import find_guide
from ludus.env.catalogue.importing import has_module
from ludus.env.catalogue.sources import CatalogueEntry, TargetSource, TextLevel
from ludus.env.environment import Builder
from ludus.env.options import Option
from ludus.proto.errors import ConfigError

_OWN_MODULES = "gymnasium.envs."
_INSTALL_COMMAND = "pip install 'ludus[gymnasium]'"
_PICTURE_NAMES = frozenset({"CarRacing"})
"""Names of environments whose only observations are pictures."""


@dataclass(frozen=True, slots=True)
class _Requirement:
    """Modules that a family of ids needs, and the command that installs them."""

    modules: tuple[str, ...]
    install_command: str


_JAX = _Requirement(("jax",), "pip install 'gymnasium[jax]'")
_REQUIREMENTS: Mapping[str, _Requirement] = {
    "box2d": _Requirement(("Box2D", "pygame"), "pip install 'gymnasium[box2d]'"),
    "mujoco": _Requirement(("mujoco", "imageio"), "pip install 'gymnasium[mujoco]'"),
    "phys2d": _JAX,
    "tabular": _JAX,
}
"""Requirements by the folder of Gymnasium that contains the environments."""


class GymnasiumTargets(TargetSource):
    """The environments of `gymnasium.make`."""

    def make_builder(self, name: str) -> Builder:
        """Return a function that makes environments of an id from options of `gymnasium.make`."""
        _require_gymnasium(f"'{GYMNASIUM}:{name}'")
        from ludus.env.adapters.gymnasium.environment import make_gymnasium_builder

        return make_gymnasium_builder(name)

    def list_environments(self) -> Iterator[CatalogueEntry]:
        """Yield the newest version of each id that Gymnasium itself registers."""
        _require_gymnasium("the catalogue of ids")
        import gymnasium

        newest: dict[tuple[str | None, str], Any] = {}
        for spec in gymnasium.registry.values():
            # The entry point of an id that has moved to another package is a function.
            if isinstance(spec.entry_point, str) and spec.entry_point.startswith(_OWN_MODULES):
                key = spec.namespace, spec.name
                other = newest.get(key)
                if other is None or (spec.version or 0) > (other.version or 0):
                    newest[key] = spec
        missing_commands = {
            folder: requirement.install_command
            for folder, requirement in _REQUIREMENTS.items()
            if not all(map(has_module, requirement.modules))
        }
        for spec in newest.values():
            folder = spec.entry_point.removeprefix(_OWN_MODULES).partition(".")[0]
            instructions = find_guide(spec.name).instructions
            yield CatalogueEntry(
                name=spec.id,
                description=instructions.partition(". ")[0].rstrip(".") or spec.name,
                family=f"{GYMNASIUM}/{folder}",
                text=_find_text_level(spec.name, instructions),
                install_command=missing_commands.get(folder, ""),
            )

    def list_options(self, name: str) -> Sequence[Option]:
        """Return the parameters of the environment's class, and the options of the adapter."""
        _require_gymnasium(f"'{GYMNASIUM}:{name}'")
        from ludus.env.adapters.gymnasium.environment import list_gymnasium_options

        return list_gymnasium_options(name)


def _find_text_level(name: str, instructions: str) -> TextLevel:
    if name in _PICTURE_NAMES:
        return "none"
    return "readable" if instructions else "raw"


def _require_gymnasium(purpose: str) -> None:
    if not has_module(GYMNASIUM):
        raise ConfigError(f"{purpose} needs Gymnasium, which is not installed; {_INSTALL_COMMAND}")
