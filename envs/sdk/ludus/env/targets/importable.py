"""Environment factories by name, so that another process can find the same one.

    CountingEnv, partial(make, game="catch"), TargetFactory
        --named--> FactoryName --JSON--> worker processes --resolve--> the factory

What has no name (a lambda, a function within a function, an object) cannot travel: code
is imported on the other side, never pickled.
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
_MAIN_ELSEWHERE = "__ludus_main__"
"""What a started script is called in workers, so that it does not start a server there."""
_WAY_OUT = (
    "give a class or function at the top level of a module, or functools.partial of one with"
    " keyword arguments that are JSON values, or serve with isolation='inline'"
)


@dataclass(frozen=True, slots=True)
class FactoryName:
    """A target as in `targets.py`, and its options, which are JSON values."""

    target: str
    options: JsonObject = field(default_factory=dict)
    script: str = ""
    """The file that was started, where it defines the target itself."""

    def resolve(self) -> TargetFactory:
        """The factory in this process; its module is imported.

        Raises:
            UserError: there is no such target; foreign code may raise anything.
        """
        if self.script:
            _load_script(self.script)
        return environment_factory(self.target, self.options)


def named(factory: EnvironmentFactory) -> FactoryName:
    """The factory's name.

    Raises:
        ConfigError: another process could not find it, or its arguments are not JSON.
    """
    if isinstance(factory, TargetFactory):
        return FactoryName(factory.target, _json(factory.target, factory.options))
    made_by: Any = factory
    options: JsonObject = {}
    while isinstance(made_by, functools.partial) and not made_by.args:
        options = {**made_by.keywords, **options}
        made_by = made_by.func
    module, qualname = getattr(made_by, "__module__", ""), getattr(made_by, "__qualname__", "")
    if not qualname or _look_up(module, qualname) != made_by:
        raise ConfigError(
            f"expected an environment factory that worker processes can import, got {made_by!r};"
            f" {_WAY_OUT}"
        )
    options = _json(qualname, options)
    if module == _MAIN:
        return _in_main(qualname, options)
    return FactoryName(f"{module}:{qualname}", options)


def _look_up(module: str, qualname: str) -> object:
    """What another process would find under that name; None where it finds nothing."""
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _json(name: str, options: JsonObject) -> JsonObject:
    try:
        returned = orjson.loads(orjson.dumps(options))
    except TypeError:
        returned = None
    if returned != options:
        raise ConfigError(
            f"expected JSON values as the options of {name}, because they go to worker"
            f" processes; got {options}; {_WAY_OUT}"
        )
    return options


def _in_main(qualname: str, options: JsonObject) -> FactoryName:
    """The name of something that the started program itself defines."""
    main = sys.modules[_MAIN]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return FactoryName(f"{spec.name}:{qualname}", options)
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise ConfigError(
            f"expected {qualname} to be defined in a file that worker processes can import, got"
            " one from an interactive session; save it as a module, or serve with"
            " isolation='inline'"
        )
    return FactoryName(f"{_MAIN_ELSEWHERE}:{qualname}", options, os.path.abspath(path))


def _load_script(path: str) -> None:
    spec = importlib.util.spec_from_file_location(_MAIN_ELSEWHERE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"expected a Python file that ends in .py, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MAIN_ELSEWHERE] = module
    spec.loader.exec_module(module)
