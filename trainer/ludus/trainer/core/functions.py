"""The functions that a run's configuration names.

    "module:attribute"   a function that every process of the run imports
    "given:name"         a function that the program passed as an object; it travels to the run's
                         processes by value, so that a function of a notebook works, too

A configuration contains only names in both cases, so that it can be written to a file.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ludus.proto.errors import ConfigError

Function: TypeAlias = Callable[..., Any]

_REGISTERED_MODULE = "given"
_registered: dict[str, Function] = {}
"""Registered functions of this process, by their paths."""


def import_object(path: str, field: str) -> Function:
    """Return the callable "module:attribute" that configuration field `field` names.

    Raises:
        ConfigError: there is no such callable.
    """
    module_name, _, attribute = path.partition(":")
    if module_name == _REGISTERED_MODULE:
        return _find_registered(path, field)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{field} = '{path}': cannot import '{module_name}' ({error}); install it or correct "
            "the name"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{field} = '{path}': '{module_name}' has no callable '{attribute}'")
    return function


def function_path(function: Function) -> str:
    """Return the path of a function; register a function that cannot be imported.

    The same function always has the same path.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    loaded_module = sys.modules.get(module or "")
    if (
        module != "__main__"
        and loaded_module is not None
        and getattr(loaded_module, name, None) is function
    ):
        return f"{module}:{name}"
    paths = (path for path, candidate in _registered.items() if candidate is function)
    return next(paths, None) or _register(function)


def registered_functions() -> dict[str, Function]:
    """Return a copy of all registered functions, by path."""
    return dict(_registered)


def register_functions(functions: Mapping[str, Function]) -> None:
    """Register functions by their paths in this process."""
    _registered.update(functions)


def unregister_function(path: str) -> None:
    """Remove a registered function, if there is one at this path."""
    _registered.pop(path, None)


def _register(function: Function) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    identifier = re.sub(r"\W+", "_", name).strip("_")
    base_path = f"{_REGISTERED_MODULE}:{identifier if identifier.isidentifier() else 'function'}"
    path, number = base_path, 1
    while path in _registered:
        number += 1
        path = f"{base_path}_{number}"
    _registered[path] = function
    return path


def _find_registered(path: str, field: str) -> Function:
    if path not in _registered:
        raise ConfigError(
            f"{field} = '{path}': this function was passed by the program that started the run, "
            "and is in no file; continue from that program with ludus.trainer.Trainer, or set "
            f"{field} to 'module:attribute'"
        )
    return _registered[path]
