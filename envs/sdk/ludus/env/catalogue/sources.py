"""Prefixes of targets: a package adds its environments to every command as `PREFIX:NAME`.

    pyproject.toml       [project.entry-points."ludus.targets"]
                         maze = "maze_games.targets:Mazes"

    maze_games/targets.py
                         class Mazes(TargetSource):
                             def make_builder(self, name): ...
                             def list_environments(self): ...

    ludus env play maze:small
    ludus env list maze

A `PackageTargets` gives a name to each value of an option of an environment package.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ludus.env.catalogue.importing import import_module
from ludus.env.catalogue.packages import find_options_type
from ludus.env.environment import AnyEnvironment, Builder
from ludus.env.options import Option, list_options, list_parameters
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

TextLevel = Literal["readable", "raw", "none"]
"""Text for language models.

"readable" is written for the environment, "raw" consists of the numbers or strings of a library,
and "none" means that language models cannot play, for example because there are only pictures.
"""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """An environment in the catalogue."""

    name: str
    """Name after the prefix, for example "chess"."""
    description: str
    """Name or short description for people, for example "Chess"."""
    family: str
    """Group of similar environments, for example "gymnasium/box2d"."""
    text: TextLevel
    min_seats: int = 1
    max_seats: int = 1
    """Largest number of players, including those that the environment itself plays."""
    install_command: str = ""
    """Command that installs what the environment needs; "" if nothing is missing."""
    prefix: str = ""
    """Prefix of the target. The catalogue sets it."""

    @property
    def target(self) -> str:
        """The complete target, for example "openspiel:chess"."""
        return f"{self.prefix}:{self.name}" if self.prefix else self.name


class TargetSource(ABC):
    """The environments behind a prefix. An entry point names the class or an instance of it."""

    package: ClassVar[str] = ""
    """Environment package whose fixed policies play these environments; "" if there is none."""

    @abstractmethod
    def make_builder(self, name: str) -> Builder:
        """Return a function that makes the environment of this name from options.

        Raises:
            NotFoundError: there is no such environment.
            ConfigError: a library is missing.
        """

    def list_environments(self) -> Iterable[CatalogueEntry]:
        """Return the entries of the catalogue, by default none.

        `ludus env list` calls this method, so it must import as little as possible.

        Raises:
            ConfigError: a library is missing; the message contains the command that installs it.
        """
        return ()

    def list_options(self, name: str) -> Sequence[Option]:
        """Return the options of an environment, by default the parameters of its builder."""
        return list_parameters(self.make_builder(name))

    def get_presets(self, name: str) -> JsonObject:
        """Return the options of `package` that the name sets; by default none."""
        return {}


class PackageTargets(TargetSource):
    """The environments of a package that differ by one option.

    The target `PREFIX:NAME` is the package with this option set to the name.
    """

    option: ClassVar[str]
    """Option of the package that the name sets."""

    def make_builder(self, name: str) -> Builder:
        """Return a function that makes the package's environment from its other options."""
        package = import_module(self.package, self.package)
        return _PresetBuilder(package.make_environment, self.get_presets(name))

    def list_options(self, name: str) -> Sequence[Option]:
        """Return the package's other options."""
        options_type = find_options_type(self.package)
        options = list_options(options_type) if options_type is not None else []
        return [option for option in options if option.name != self.option]

    @property
    def default_name(self) -> str:
        """The name that the package has without options."""
        options_type = find_options_type(self.package)
        options = list_options(options_type) if options_type is not None else []
        return next((option.default for option in options if option.name == self.option), "")

    def get_presets(self, name: str) -> JsonObject:
        """Return the option that the name sets."""
        return {self.option: name}


class _PresetBuilder:
    """A builder with fixed values of some options."""

    def __init__(self, builder: Builder, presets: JsonObject) -> None:
        self._builder = builder
        self._presets = presets
        # Targets read the class of the environments from the annotations of a builder.
        self.__wrapped__ = builder

    def __call__(self, **options: Any) -> AnyEnvironment:
        for name in options:
            if name in self._presets:
                raise ConfigError(
                    f"the target already sets {name} = {self._presets[name]!r}, got also "
                    f"{name} = {options[name]!r}; remove the option or change the target"
                )
        return self._builder(**self._presets, **options)


def unwrap_builder(builder: Builder) -> Any:
    """Return the function or class behind a builder."""
    return inspect.unwrap(builder)
