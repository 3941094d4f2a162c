"""Targets: one string names an environment on the command line, in servers and in workers.

| target                    | environment                                                    |
|---------------------------|----------------------------------------------------------------|
| `openspiel_env`           | an installed package with `make_environment`                   |
| `module:Class`            | an `Environment` subclass, or a function that returns one      |
| `gymnasium:CartPole-v1`   | an id of `gymnasium.make`, also `module:id`                    |
| `openenv:module:Class`    | an environment class written for OpenEnv, unchanged            |
| `openenv:module:app`      | the application that OpenEnv's `create_app` returned           |

    (target, options) --environment_factory--> TargetFactory --()--> Environment

A `TargetFactory` contains only the target and its options, so another process with the same two
values makes the same environments. Modules are also imported from the working directory.
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
"""Ending of the names of environment packages."""


@dataclass(frozen=True, slots=True)
class TargetFactory:
    """A factory of one target's environments."""

    target: str
    options: JsonObject = field(default_factory=dict)

    @property
    def one_per_process(self) -> bool:
        """True if a process can have only one of its environments at a time."""
        return bool(getattr(_find_builder(self.target), "one_per_process", False))

    @property
    def isolation(self) -> Literal["inline", "process"]:
        """Default isolation of its sessions on a server."""
        return "process" if self.one_per_process else "inline"

    def __call__(self) -> AnyEnvironment:
        """Make a new environment.

        Raises:
            ConfigError: the environment cannot be made with these options.
        """
        try:
            environment = _find_builder(self.target)(**self.options)
        except TypeError as error:
            raise ConfigError(
                f"environment '{self.target}' cannot be made with {self.options}: {error}"
            ) from error
        if not isinstance(environment, Environment):
            raise ConfigError(
                f"'{self.target}' must make a ludus.env.Environment, got"
                f" {type(environment).__name__}; {_suggest_target(self.target, environment)}"
            )
        return environment


@dataclass(frozen=True, slots=True)
class EnvironmentPackage:
    """An installed environment package."""

    name: str
    version: str
    summary: str


def environment_factory(target: str, options: JsonObject) -> TargetFactory:
    """Return a factory of the target's environments with `options`.

    Raises:
        NotFoundError: the package, module, class or id does not exist.
        ConfigError: it is not an environment, or a library that it needs is missing.
    """
    _find_builder(target)
    return TargetFactory(target, options)


def make_environment(target: str, options: JsonObject) -> AnyEnvironment:
    """Make a new environment of the target."""
    return environment_factory(target, options)()


def is_package(target: str) -> bool:
    """Return True if the target is the name of an environment package."""
    return ":" not in target


def installed_packages() -> list[EnvironmentPackage]:
    """List the installed environment packages by name, without importing them."""
    distributions = packages_distributions()
    names = sorted(name for name in distributions if name.endswith(SUFFIX) and _has_server(name))
    return [_describe(name, distributions[name][0]) for name in names]


def require_package(name: str) -> None:
    """Check that a package of this name can be imported.

    Raises:
        NotFoundError: it cannot; the message suggests similar names.
    """
    _add_working_directory()
    try:
        exists = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        exists = False
    if exists:
        return
    names = [package.name for package in installed_packages()]
    hint = did_you_mean(name, names) or f"installed: {', '.join(names) or 'none'}"
    raise NotFoundError(f"no environment package '{name}'; {hint}")


def load_object(target: str, path: str) -> Any:
    """Return the object that `module:attribute` names.

    Raises:
        NotFoundError: the module or attribute does not exist.
        ConfigError: the path has another form, or the module cannot be imported.
    """
    module_name, _, attributes = path.partition(":")
    if not module_name or not attributes:
        raise ConfigError(f"the target must be like module:Class, got '{target}'")
    module = _import(target, module_name)
    value: Any = module
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            names = [name for name in vars(value) if not name.startswith("_")]
            hint = did_you_mean(attribute, names) or f"see {getattr(module, '__file__', '')}"
            raise NotFoundError(f"'{module_name}' has no '{attributes}'; {hint}")
        value = getattr(value, attribute)
    return value


@functools.lru_cache(maxsize=64)
def _find_builder(target: str) -> Builder:
    kind, _, target_path = target.partition(":")
    if kind == GYMNASIUM and target_path:
        return _gymnasium_builder(target_path)
    if kind == OPENENV and target_path:
        from ludus.env.adapters.openenv.environment import openenv_builder

        return openenv_builder(target, load_object(target, target_path))
    if target_path:
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
    value = load_object(target, target)
    if inspect.isclass(value) and not issubclass(value, Environment):
        raise ConfigError(
            f"'{target}' must be a subclass of ludus.env.Environment;"
            f" {_suggest_target(target, value)}"
        )
    if not callable(value):
        raise ConfigError(
            f"'{target}' must be an Environment class or a function that makes one,"
            f" got {type(value).__name__}; {_suggest_target(target, value)}"
        )
    builder: Builder = value
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
    _add_working_directory()
    return gymnasium_builder(env_id)


def _suggest_target(target: str, value: object) -> str:
    """Suggest what the user may have meant."""
    kind = value if inspect.isclass(value) else type(value)
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if modules & {"openenv", "openenv_core"} or kind.__name__ == "FastAPI":
        return f"for an environment written for OpenEnv, use the target openenv:{target}"
    if GYMNASIUM in modules:
        return "for a Gymnasium environment, register it and use the target gymnasium:<id>"
    return "subclass ludus.env.Environment"


def _import(target: str, name: str) -> ModuleType:
    _add_working_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing_module = error.name or name
        if name == missing_module or name.startswith(f"{missing_module}."):
            raise NotFoundError(
                f"no module '{name}', which '{target}' names, in {Path.cwd()} or among the"
                " installed modules; check the spelling, or change to its folder"
            ) from None
        raise ConfigError(
            f"'{target}' needs the module '{missing_module}', which is not installed;"
            f" pip install {missing_module.partition('.')[0]}"
        ) from error
    except ImportError as error:
        raise ConfigError(f"'{target}' cannot be imported: {error}") from error


def _add_working_directory() -> None:
    # Installed commands do not import from the working directory; `python -m` does.
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _has_server(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / "server" / "app.py").is_file() for folder in folders or ())


def _describe(name: str, distribution: str) -> EnvironmentPackage:
    fields = metadata(distribution)
    return EnvironmentPackage(name, fields["Version"], fields["Summary"] or "")
