"""Imports of the modules that targets name, from installed packages or the working directory."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ludus.proto.errors import ConfigError, NotFoundError, describe_code_error, did_you_mean


def load_object(target: str, path: str) -> Any:
    """Return the object that `module:attribute` names.

    Raises:
        NotFoundError: the module or attribute does not exist.
        ConfigError: the path does not have this form, or the module cannot be imported.
    """
    module_name, _, attributes = path.partition(":")
    if not module_name or not attributes:
        raise ConfigError(f"the target must have the form module:Class, got '{target}'")
    module = import_module(target, module_name)
    target_object: Any = module
    for attribute in attributes.split("."):
        if not hasattr(target_object, attribute):
            names = [name for name in vars(target_object) if not name.startswith("_")]
            hint = did_you_mean(attribute, names) or f"see {getattr(module, '__file__', '')}"
            raise NotFoundError(f"'{module_name}' has no '{attributes}'; {hint}")
        target_object = getattr(target_object, attribute)
    return target_object


def import_module(target: str, name: str) -> ModuleType:
    """Import a module that a target names.

    Raises:
        NotFoundError: the module does not exist.
        ConfigError: the module cannot be imported, for example because it needs another module.
    """
    add_working_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing_module = error.name or name
        if name == missing_module or name.startswith(f"{missing_module}."):
            raise NotFoundError(
                f"no module '{name}' (from target '{target}') in "
                f"{_find_folder() or 'the working folder'} or in the installed modules; "
                f"{suggest_module(name)}"
            ) from None
        raise ConfigError(
            f"'{target}' needs the module '{missing_module}', which is not installed;"
            f" pip install {missing_module.partition('.')[0]}"
        ) from error
    except Exception as error:  # third-party code
        raise ConfigError(
            f"'{target}' cannot be imported: {describe_code_error(error)}; correct the module"
        ) from error


def has_module(name: str) -> bool:
    """Return True if a module of this name can be imported. Only its parents are imported."""
    add_working_directory()
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def suggest_module(name: str) -> str:
    """Return a remedy for a module that does not exist; `name` may be the path of its file."""
    if "/" in name or name.endswith(".py"):
        return f"for a file, give its module and class, {Path(name).stem}:Class, from its folder"
    return "check the spelling, or run from the folder that contains it"


def add_working_directory() -> None:
    """Let the modules of the working directory be imported after all others."""
    # Installed commands do not import from the working directory; `python -m` does.
    folder = _find_folder()
    if folder and folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _find_folder() -> str:
    """Return the working folder; "" if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
