"""One string names an environment everywhere: on the command line, in a server, in a worker.

| target                    | what it names                                                  |
|---------------------------|----------------------------------------------------------------|
| `openspiel_env`           | an installed package with `make_environment`                   |
| `module:Class`            | an `Environment` subclass, or anything that returns one        |
| `gymnasium:CartPole-v1`   | what `gymnasium.make` knows by that id, also `module:id`       |
| `openenv:module:Class`    | an environment class written for OpenEnv, unchanged            |
| `openenv:module:app`      | the application that OpenEnv's `create_app` returned           |

    (target, options) --environment_factory--> TargetFactory --()--> Environment

A `TargetFactory` is nothing but target and options: another process that is told the two
makes the same environments. Modules are also found in the working directory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass, field
from importlib.metadata import metadata, packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from ludus.env.adapters import GYMNASIUM, OPENENV
from ludus.env.environment import AnyEnvironment, Builder, Environment
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean

SUFFIX = "_env"
"""Environment packages are called `<something>_env`."""


@dataclass(frozen=True, slots=True)
class TargetFactory:
    """Makes the environments of one target."""

    target: str
    options: JsonObject = field(default_factory=dict)

    @property
    def one_per_process(self) -> bool:
        """True when a process can hold only one of its environments at a time."""
        return bool(getattr(_builder_of(self.target), "one_per_process", False))

    @property
    def isolation(self) -> Literal["inline", "process"]:
        """Where a server runs its sessions unless it is told."""
        return "process" if self.one_per_process else "inline"

    def __call__(self) -> AnyEnvironment:
        """A new environment.

        Raises:
            ConfigError: it cannot be built with these options.
        """
        try:
            environment = _builder_of(self.target)(**self.options)
        except TypeError as error:
            raise ConfigError(
                f"environment '{self.target}' cannot be built with {self.options}: {error}"
            ) from error
        if not isinstance(environment, Environment):
            raise ConfigError(
                f"expected '{self.target}' to make a ludus.env.Environment, got"
                f" {type(environment).__name__}; {_other_kinds(self.target, environment)}"
            )
        return environment


@dataclass(frozen=True, slots=True)
class EnvironmentPackage:
    """An installed environment package."""

    name: str
    version: str
    summary: str


def environment_factory(target: str, options: JsonObject) -> TargetFactory:
    """What makes the environments that the target names, built with `options`.

    Raises:
        NotFoundError: no such package, module, class or id.
        ConfigError: it is there but is no environment, or a library it needs is not.
    """
    _builder_of(target)
    return TargetFactory(target, options)


def make_environment(target: str, options: JsonObject) -> AnyEnvironment:
    """A new environment of the target: what a worker process that is told the two calls."""
    return environment_factory(target, options)()


def is_package(target: str) -> bool:
    """True when the target names an environment package and nothing within one."""
    return ":" not in target


def installed_packages() -> list[EnvironmentPackage]:
    """The environment packages of this Python, by name; none of them is imported."""
    found = packages_distributions()
    names = sorted(name for name in found if name.endswith(SUFFIX) and _has_server(name))
    return [_describe(name, found[name][0]) for name in names]


def require_package(name: str) -> None:
    """Refuse a name under which no module can be imported.

    Raises:
        NotFoundError: there is none; the message names what is close.
    """
    _see_working_directory()
    try:
        is_there = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        is_there = False
    if is_there:
        return
    names = [package.name for package in installed_packages()]
    hint = did_you_mean(name, names) or f"installed: {', '.join(names) or 'none'}"
    raise NotFoundError(f"no environment package '{name}'; {hint}")


def load_object(target: str, path: str) -> Any:
    """What `module:attribute` names.

    Raises:
        NotFoundError: no such module or attribute.
        ConfigError: the path has another form, or the module cannot be imported.
    """
    module_name, _, attributes = path.partition(":")
    if not module_name or not attributes:
        raise ConfigError(f"expected a target like module:Class, got '{target}'")
    module = _import(target, module_name)
    found: Any = module
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            names = [name for name in vars(found) if not name.startswith("_")]
            hint = did_you_mean(attribute, names) or f"see {getattr(module, '__file__', '')}"
            raise NotFoundError(f"'{module_name}' has no '{attributes}'; {hint}")
        found = getattr(found, attribute)
    return found


@functools.lru_cache(maxsize=64)
def _builder_of(target: str) -> Builder:
    kind, _, rest = target.partition(":")
    if kind == GYMNASIUM and rest:
        return _gymnasium_builder(rest)
    if kind == OPENENV and rest:
        from ludus.env.adapters.openenv.environment import openenv_builder

        return openenv_builder(target, load_object(target, rest))
    if rest:
        return _object_builder(target)
    require_package(target)
    make: Builder | None = getattr(_import(target, target), "make_environment", None)
    if make is None:
        raise ConfigError(
            f"'{target}' has no make_environment(**options); name an environment package, or a"
            f" class in it as {target}:Class"
        )
    return make


def _object_builder(target: str) -> Builder:
    found = load_object(target, target)
    if inspect.isclass(found) and not issubclass(found, Environment):
        raise ConfigError(
            f"expected '{target}' to be a ludus.env.Environment, got a class that is none;"
            f" {_other_kinds(target, found)}"
        )
    if not callable(found):
        raise ConfigError(
            f"expected '{target}' to be an Environment class or a function that makes one,"
            f" got {type(found).__name__}; {_other_kinds(target, found)}"
        )
    builder: Builder = found
    return builder


def _gymnasium_builder(env_id: str) -> Builder:
    try:
        from ludus.env.adapters.gymnasium.environment import gymnasium_builder
    except ModuleNotFoundError as error:
        if error.name != GYMNASIUM:
            raise
        raise ConfigError(
            f"'{GYMNASIUM}:{env_id}' needs Gymnasium, which is not installed; pip install gymnasium"
        ) from None
    _see_working_directory()
    return gymnasium_builder(env_id)


def _other_kinds(target: str, found: object) -> str:
    """What else the user may have meant."""
    kind = found if inspect.isclass(found) else type(found)
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if modules & {"openenv", "openenv_core"} or kind.__name__ == "FastAPI":
        return f"for what was written for OpenEnv, name openenv:{target}"
    if GYMNASIUM in modules:
        return "for a Gymnasium environment, register it and name gymnasium:<id>"
    return "subclass ludus.env.Environment"


def _import(target: str, name: str) -> ModuleType:
    _see_working_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise NotFoundError(
                f"no module '{name}', which '{target}' names, in {Path.cwd()} or among the"
                " installed ones; check the spelling, or go to the folder it is in"
            ) from None
        raise ConfigError(
            f"'{target}' needs the module '{missing}', which is not installed;"
            f" pip install {missing.partition('.')[0]}"
        ) from error
    except ImportError as error:
        raise ConfigError(f"'{target}' cannot be imported: {error}") from error


def _see_working_directory() -> None:
    # Installed commands do not look there; `python -m` does.
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _has_server(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "server" / "app.py").is_file() for place in places or ())


def _describe(name: str, distribution: str) -> EnvironmentPackage:
    about = metadata(distribution)
    return EnvironmentPackage(name, about["Version"], about["Summary"] or "")
