"""Names of environment factories, with which another process finds the same factory.

    CountingEnv, partial(make, game="catch"), TargetFactory
        --name_factory--> FactoryName --JSON--> worker processes --resolve--> the factory

A lambda, a function within a function, or an object has no name and cannot be sent, because
the other process imports code and never unpickles it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import orjson

from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.targets.targets import TargetFactory, environment_factory
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

_MAIN = "__main__"
_MAIN_IN_WORKERS = "__ludus_main__"
"""Module name of a started script in workers, so that it does not start a server there."""
_REMEDY = (
    "give a class or function at the top level of a module, or functools.partial of one with"
    " keyword arguments that are JSON values, or serve with isolation='inline'"
)


@dataclass(frozen=True, slots=True)
class FactoryName:
    """A target as in `targets.py`, with options that are JSON values."""

    target: str
    options: JsonObject = field(default_factory=dict)
    script: str = ""
    """Path of the started script, if it defines the target."""

    def resolve(self) -> TargetFactory:
        """Import the module and return the factory in this process.

        Raises:
            UserError: the target does not exist. Third-party code may raise any error.
        """
        if self.script:
            _load_script(self.script)
        return environment_factory(self.target, self.options)


def name_factory(factory: EnvironmentFactory) -> FactoryName:
    """Return the name of a factory.

    Raises:
        ConfigError: another process could not find the factory, or its arguments are not JSON.
    """
    if isinstance(factory, TargetFactory):
        return FactoryName(factory.target, _require_json(factory.target, factory.options))
    origin: Any = factory
    options: JsonObject = {}
    while isinstance(origin, functools.partial) and not origin.args:
        options = {**origin.keywords, **options}
        origin = origin.func
    module, qualname = getattr(origin, "__module__", ""), getattr(origin, "__qualname__", "")
    if not qualname or _look_up(module, qualname) != origin:
        raise ConfigError(
            f"worker processes cannot import the environment factory {origin!r}; {_REMEDY}"
        )
    options = _require_json(qualname, options)
    if module == _MAIN:
        return _name_in_main(qualname, options)
    return FactoryName(f"{module}:{qualname}", options)


def _look_up(module: str, qualname: str) -> object:
    """Return what another process would find under that name, or None."""
    target: object = sys.modules.get(module)
    for part in qualname.split("."):
        target = getattr(target, part, None)
    return target


def _require_json(name: str, options: JsonObject) -> JsonObject:
    try:
        returned = orjson.loads(orjson.dumps(options))
    except TypeError:
        returned = None
    if returned != options:
        raise ConfigError(
            f"the options of {name} must be JSON values, because they are sent to worker"
            f" processes; got {options}; {_REMEDY}"
        )
    return options


def _name_in_main(qualname: str, options: JsonObject) -> FactoryName:
    """Return the name of a factory that the started program defines."""
    main = sys.modules[_MAIN]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return FactoryName(f"{spec.name}:{qualname}", options)
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise ConfigError(
            f"worker processes cannot import {qualname}, because it is defined in an interactive"
            " session; save it as a module, or serve with isolation='inline'"
        )
    return FactoryName(f"{_MAIN_IN_WORKERS}:{qualname}", options, os.path.abspath(path))


def _load_script(path: str) -> None:
    spec = importlib.util.spec_from_file_location(_MAIN_IN_WORKERS, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"the script must be a Python file that ends in .py, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MAIN_IN_WORKERS] = module
    spec.loader.exec_module(module)
