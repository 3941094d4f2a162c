"""The functions that a run's configuration names, wherever they come from.

    "module:attribute"   imported, in every process of the run
    "given:name"         handed over by the program that holds the run as an object; it travels to
                         the run's processes by value, so a cell of a notebook will do

A configuration stays a file either way: it holds names.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ludus.proto.errors import ConfigError

Function: TypeAlias = Callable[..., Any]

_GIVEN = "given"
_given: dict[str, Function] = {}
"""By their paths. Like what is imported, it belongs to the process."""


def import_object(path: str, field: str) -> Function:
    """The callable named "module:attribute" in configuration field `field`.

    Raises:
        ConfigError: there is none.
    """
    module_name, _, attribute = path.partition(":")
    if module_name == _GIVEN:
        return _find_given(path, field)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{field} = '{path}': cannot import '{module_name}' ({error}); install it or fix "
            "the name"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{field} = '{path}': '{module_name}' has no callable '{attribute}'")
    return found


def name_of(function: Function) -> str:
    """The path of a function: where it is imported from, or that of one that is given.

    The same function has the same path each time.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    loaded = sys.modules.get(module or "")
    if module != "__main__" and loaded is not None and getattr(loaded, name, None) is function:
        return f"{module}:{name}"
    known = next((path for path, given in _given.items() if given is function), None)
    return known or _give(function)


def given_functions() -> dict[str, Function]:
    """All that this process was given, by path."""
    return dict(_given)


def take_functions(given: Mapping[str, Function]) -> None:
    """Know these functions from now on, by their paths."""
    _given.update(given)


def forget_function(path: str) -> None:
    """Know the function of that path no longer."""
    _given.pop(path, None)


def _give(function: Function) -> str:
    plain = re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_")
    path = first = f"{_GIVEN}:{plain if plain.isidentifier() else 'function'}"
    number = 1
    while path in _given:
        number += 1
        path = f"{first}_{number}"
    _given[path] = function
    return path


def _find_given(path: str, field: str) -> Function:
    if path not in _given:
        raise ConfigError(
            f"{field} = '{path}': the program that began this run handed that function over, and "
            "no file has it; continue from such a program, with ludus.trainer.Trainer, or set "
            f"{field} to 'module:attribute'"
        )
    return _given[path]
