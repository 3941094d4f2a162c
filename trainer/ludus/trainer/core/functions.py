"""The functions that a run's configuration names.

    "module:attribute"   a function that every process of the run imports
    "given:name"         a function that the program passed as an object; it is sent to the run's
                         processes by value, so a function defined in a notebook works too

In both cases the configuration contains only a name, so it can be written to a file.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ludus.proto.errors import ConfigError, describe_code_error, did_you_mean
from ludus.proto.paths import describe_place

Function: TypeAlias = Callable[..., Any]

_REGISTERED_PREFIX = "given"
_registered_functions: dict[str, Function] = {}
"""Functions registered in this process, by path."""


def import_callable(path: str, field: str) -> Function:
    """Return the callable at `path`, which is the value of configuration field `field`.

    Raises:
        ConfigError: there is no such callable.
    """
    module_name, _, attribute = path.partition(":")
    if module_name == _REGISTERED_PREFIX:
        return _find_registered_function(path, field)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module
        problem = _describe_import_error(module_name, error)
        raise ConfigError(f"{field} = '{path}': {problem}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [name for name, member in vars(module).items() if callable(member)]
        hint = did_you_mean(attribute, names) or f"see '{getattr(module, '__file__', module_name)}'"
        raise ConfigError(
            f"{field} = '{path}': '{module_name}' has no callable '{attribute}'; {hint}"
        )
    return function


def get_or_register_path(function: Function) -> str:
    """Return the path of a function. A function that cannot be imported is registered first.

    The same function always gets the same path.
    """
    module_name = getattr(function, "__module__", None) or ""
    attribute = getattr(function, "__qualname__", "")
    is_importable = getattr(sys.modules.get(module_name), attribute, None) is function
    if is_importable and module_name != "__main__":
        return f"{module_name}:{attribute}"
    for path, registered_function in _registered_functions.items():
        if registered_function is function:
            return path
    return _register_function(function)


def copy_registered_functions() -> dict[str, Function]:
    """Return a copy of all registered functions, by path."""
    return dict(_registered_functions)


def register_functions(functions: Mapping[str, Function]) -> None:
    """Register functions by their paths in this process."""
    _registered_functions.update(functions)


def unregister_function(path: str) -> None:
    """Remove a registered function, if there is one at this path."""
    _registered_functions.pop(path, None)


def _describe_import_error(module_name: str, error: Exception) -> str:
    """Return why a module cannot be imported, and the remedy."""
    missing_name = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing_name is None or not f"{module_name}.".startswith(f"{missing_name}."):
        return f"cannot import '{module_name}': {describe_code_error(error)}; correct the module"
    hint = did_you_mean(missing_name, [path.stem for path in Path().glob("*.py")])
    remedy = "correct the name, install the module, or start in the folder that contains it"
    return (
        f"there is no module '{missing_name}'{describe_place(module_name)} or among the installed "
        f"modules; {hint or remedy}"
    )


def _register_function(function: Function) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    identifier = re.sub(r"\W+", "_", name).strip("_")
    base_path = f"{_REGISTERED_PREFIX}:{identifier if identifier.isidentifier() else 'function'}"
    path, suffix = base_path, 1
    while path in _registered_functions:
        suffix += 1
        path = f"{base_path}_{suffix}"
    _registered_functions[path] = function
    return path


def _find_registered_function(path: str, field: str) -> Function:
    if path not in _registered_functions:
        raise ConfigError(
            f"{field} = '{path}': this function was passed by the program that started the run, "
            "and is in no file; continue from that program with ludus.trainer.Trainer, or set "
            f"{field} to 'module:attribute'"
        )
    return _registered_functions[path]
