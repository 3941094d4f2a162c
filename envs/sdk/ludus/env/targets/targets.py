"""Targets: one string names an environment on the command line, in servers and in workers.

| target                    | environment                                                    |
|---------------------------|----------------------------------------------------------------|
| `openspiel_env`           | an installed package with `make_environment`                   |
| `module:Class`            | an `Environment` subclass, or a function that returns one      |
| `PREFIX:NAME`             | an environment of a package that declares the prefix           |
| `gymnasium:CartPole-v1`   | an id for `gymnasium.make`; `module:id` also works             |
| `openenv:module:Class`    | an environment class written for OpenEnv, unchanged            |
| `openenv:module:app`      | the application that OpenEnv's `create_app` returned           |

`registry.py` finds the prefixes; a module with the name of a prefix cannot be a target.

    (target, options) --environment_factory--> TargetFactory --()--> Environment

A `TargetFactory` contains only JSON values, so another process can make the same environments.
Modules are also imported from the working directory.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, Literal, get_type_hints

import orjson

from ludus.env.adapters import GYMNASIUM
from ludus.env.catalogue.importing import (
    add_working_directory,
    has_module,
    import_module,
    load_object,
    suggest_module,
)
from ludus.env.catalogue.listing import read_catalogue, suggest_targets
from ludus.env.catalogue.registry import find_source
from ludus.env.catalogue.sources import unwrap_builder
from ludus.env.environment import AnyEnvironment, Builder, Environment
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    ConfigError,
    LudusError,
    NotFoundError,
    describe_code_error,
    did_you_mean,
)

_MAIN = "__main__"
_MAIN_IN_WORKERS = "__ludus_main__"
"""Module name under which workers import the main script, so that it starts no server there."""
_IMPORTABLE_HINT = (
    "give a class or function at the top level of a module, or functools.partial of one with"
    " keyword arguments that are JSON values, or serve with isolation='inline'"
)


@dataclass(frozen=True, slots=True)
class TargetFactory:
    """A factory of the environments that a target names."""

    target: str
    options: JsonObject = field(default_factory=dict)
    script: str = ""
    """Path of the main script if it defines the target; otherwise empty."""

    def load(self) -> None:
        """Import the target.

        Raises:
            NotFoundError: the package, module, class or id does not exist.
            ConfigError: the target is not an environment, or a library that it needs is missing.
        """
        if self.script:
            _load_script(self.script)
        _find_builder(self.target)

    @property
    def one_per_process(self) -> bool:
        """True if a process can have only one of its environments at a time."""
        return bool(self._read_attribute("one_per_process", default=False))

    @property
    def needs_network(self) -> bool:
        """False if its environments declare that they need no network."""
        return bool(self._read_attribute("needs_network", default=True))

    @property
    def isolation(self) -> Literal["inline", "process"]:
        """Default isolation of its sessions on a server."""
        return "process" if self.one_per_process else "inline"

    def _read_attribute(self, name: str, *, default: bool) -> Any:
        """Return an attribute of the builder, or of the class that a function returns."""
        builder = unwrap_builder(_find_builder(self.target))
        if inspect.isclass(builder) or hasattr(builder, name):
            return getattr(builder, name, default)
        try:
            environment_type = get_type_hints(builder).get("return")
        except Exception:  # noqa: BLE001 - third-party annotations may not be importable
            return default
        return getattr(environment_type, name, default)

    def __call__(self) -> AnyEnvironment:
        """Make a new environment.

        Raises:
            ConfigError: the environment cannot be made with these options.
        """
        builder = _find_builder(self.target)
        try:
            environment = builder(**self.options)
        except TypeError as error:
            problem = _find_unknown_option(builder, self.options) or f": {error}"
            raise ConfigError(
                f"environment '{self.target}' cannot be made with {self.options}{problem}"
            ) from error
        if not isinstance(environment, Environment):
            raise ConfigError(
                f"'{self.target}' must make a ludus.env.Environment, got"
                f" {type(environment).__name__}; {_suggest_target(self.target, environment)}"
            )
        return environment


def environment_factory(target: str, options: JsonObject) -> TargetFactory:
    """Return a loaded factory of the target's environments; see `TargetFactory.load`."""
    factory = TargetFactory(target, options)
    factory.load()
    return factory


def check_environment_options(target: str, options: JsonObject) -> AnyEnvironment:
    """Make an environment before a run or a server uses the target, and return the environment.

    Raises:
        UserError: there is no such target, or its environment cannot be made with these options.
    """
    factory = environment_factory(target, options)
    try:
        return factory()
    except LudusError:
        raise
    except Exception as error:  # third-party code
        raise ConfigError(
            f"environment '{target}' cannot be made with {options}: {describe_code_error(error)}; "
            "correct the options or the environment"
        ) from error


def make_importable_factory(factory: EnvironmentFactory) -> TargetFactory:
    """Convert a factory to a `TargetFactory`, which another process can import.

    Lambdas, nested functions and callable instances have no target, because the other process
    imports code and never unpickles it.

    Raises:
        ConfigError: the factory has no target, or its arguments are not JSON.
    """
    if isinstance(factory, TargetFactory):
        _require_json(factory.target, factory.options)
        return factory
    function: Any = factory
    options: JsonObject = {}
    while isinstance(function, functools.partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    module, qualname = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not qualname or _look_up(module, qualname) != function:
        raise ConfigError(
            f"worker processes cannot import the environment factory {function!r};"
            f" {_IMPORTABLE_HINT}"
        )
    _require_json(qualname, options)
    if module == _MAIN:
        return _name_in_main(qualname, options)
    return TargetFactory(f"{module}:{qualname}", options)


def is_package(target: str) -> bool:
    """Return True if the target is the name of an environment package."""
    return ":" not in target


def require_package(name: str) -> None:
    """Check that a package of this name can be imported.

    Raises:
        NotFoundError: the package does not exist; the message suggests similar names.
    """
    if has_module(name):
        return
    if "/" in name or name.endswith(".py"):
        hint = suggest_module(name)
    else:
        entries = read_catalogue().entries
        hint = suggest_targets(name, entries) or "`ludus env list` prints all environments"
    raise NotFoundError(f"no environment package '{name}'; {hint}")


@functools.lru_cache(maxsize=64)
def _find_builder(target: str) -> Builder:
    prefix, _, name = target.partition(":")
    source = find_source(prefix) if name else None
    if source is not None:
        add_working_directory()
        return source.make_builder(name)
    if name:
        _require_module(target, prefix)
        return _load_object_builder(target)
    require_package(target)
    builder: Builder | None = getattr(import_module(target, target), "make_environment", None)
    if builder is None:
        raise ConfigError(
            f"'{target}' has no make_environment(**options); name an environment package, or a"
            f" class in it as {target}:Class"
        )
    return builder


def _require_module(target: str, name: str) -> None:
    """Check that the module of a target exists. The name may be meant as a prefix.

    Raises:
        NotFoundError: there is no such module, and the catalogue has a similar target.
    """
    if not name.isidentifier() or has_module(name):
        return
    hint = suggest_targets(target, read_catalogue().entries)
    if hint:
        raise NotFoundError(f"no module or prefix '{name}' (from target '{target}'); {hint}")


def _load_object_builder(target: str) -> Builder:
    target_object = load_object(target, target)
    if inspect.isclass(target_object) and not issubclass(target_object, Environment):
        raise ConfigError(
            f"'{target}' must be a subclass of ludus.env.Environment;"
            f" {_suggest_target(target, target_object)}"
        )
    if not callable(target_object):
        raise ConfigError(
            f"'{target}' must be an Environment class or a function that makes one,"
            f" got {type(target_object).__name__}; {_suggest_target(target, target_object)}"
        )
    builder: Builder = target_object
    return builder


def _suggest_target(target: str, target_object: object) -> str:
    """Suggest the target that the user may have meant."""
    object_type = target_object if inspect.isclass(target_object) else type(target_object)
    modules = {base.__module__.partition(".")[0] for base in object_type.__mro__}
    if modules & {"openenv", "openenv_core"} or object_type.__name__ == "FastAPI":
        return f"for an environment written for OpenEnv, use the target openenv:{target}"
    if GYMNASIUM in modules:
        return "for a Gymnasium environment, register it and use the target gymnasium:<id>"
    return "subclass ludus.env.Environment"


def _find_unknown_option(builder: Builder, options: JsonObject) -> str:
    """Return a clause about an option that a builder does not accept; empty if it accepts all."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):
        return ""
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    names = [parameter.name for parameter in parameters]
    unknown_names = [name for name in options if name not in names]
    if not unknown_names:
        return ""
    hint = did_you_mean(unknown_names[0], names) or f"it has {', '.join(names) or 'no options'}"
    return f": unknown option '{unknown_names[0]}'; {hint}"


def _look_up(module: str, qualname: str) -> object:
    """Return the object that another process would import by that name, or None."""
    attribute: object = sys.modules.get(module)
    for name in qualname.split("."):
        attribute = getattr(attribute, name, None)
    return attribute


def _require_json(name: str, options: JsonObject) -> None:
    try:
        decoded_options = orjson.loads(orjson.dumps(options))
    except TypeError:
        decoded_options = None
    if decoded_options != options:
        raise ConfigError(
            f"the options of {name} must be JSON values, because they are sent to worker"
            f" processes; got {options}; {_IMPORTABLE_HINT}"
        )


def _name_in_main(qualname: str, options: JsonObject) -> TargetFactory:
    main_module = sys.modules[_MAIN]
    spec = getattr(main_module, "__spec__", None)
    if spec is not None:  # python -m package.module
        return TargetFactory(f"{spec.name}:{qualname}", options)
    path = getattr(main_module, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise ConfigError(
            f"worker processes cannot import {qualname}, because it is defined in an interactive"
            " session; save it as a module, or serve with isolation='inline'"
        )
    return TargetFactory(f"{_MAIN_IN_WORKERS}:{qualname}", options, os.path.abspath(path))


def _load_script(path: str) -> None:
    spec = importlib.util.spec_from_file_location(_MAIN_IN_WORKERS, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"the script must be a Python file that ends in .py, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MAIN_IN_WORKERS] = module
    spec.loader.exec_module(module)
