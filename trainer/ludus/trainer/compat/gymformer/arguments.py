"""Checks of arguments to Gymformer's functions. Each error starts with the argument's name."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from ludus.proto.config.section import RUN_NAME_PATTERN
from ludus.proto.errors import ConfigError, NotFoundError


def check_count(name: str, value: Any, *, min_value: int = 1) -> None:
    """Check that a value is an integer of at least `min_value`; NumPy integers are accepted."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < min_value:
        raise ConfigError(f"{name} must be an integer of at least {min_value}, got {value!r:.80}")


def check_number(name: str, value: Any) -> None:
    """Check that a value is a finite number and not negative."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name} must be a finite number of 0 or more, got {value!r:.80}")


def check_flag(name: str, value: Any) -> None:
    """Check that a value is a bool. The string "false" would otherwise count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r:.80}")


def check_run_name(name: Any) -> None:
    """Check that a name is None or valid for a run and its folder."""
    if name is not None and not (isinstance(name, str) and re.fullmatch(RUN_NAME_PATTERN, name)):
        raise ConfigError(
            "name must have at most 47 letters, digits, '.', '_' and '-', and start with a letter "
            f"or a digit, got {name!r:.80}"
        )


def require_path(name: str, value: Any) -> str:
    """Return an argument that is a path or a model id, as a string."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a path, got {value!r:.80}")
    return os.fspath(value)


def require_folder(name: str, value: Any) -> Path:
    """Return the path of a folder that exists or can be created."""
    folder = Path(require_path(name, value))
    ancestors = (folder, *folder.absolute().parents)
    nearest = next((path for path in ancestors if path.exists()), folder)
    if nearest.exists() and not nearest.is_dir():
        raise ConfigError(f"{name} = '{folder}' must be a folder, but '{nearest}' is a file")
    return folder


def require_device(name: str, value: Any) -> str | None:
    """Return the name of a torch device of this machine; None stays None."""
    if value is None:
        return None
    if not isinstance(value, (str, torch.device)):
        raise ConfigError(f"{name} must be None or a string such as 'cpu', got {value!r:.80}")
    try:
        torch.empty(0, device=value)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{name} = '{value}' cannot be used: {str(error).splitlines()[0]:.200}; use 'cpu' "
            f"or a GPU of this machine ({torch.cuda.device_count()} available)"
        ) from None
    return str(value)


@contextmanager
def rename_setting_in_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the setting at the start of the block's errors to the name of an argument."""
    try:
        yield
    except (ConfigError, NotFoundError) as error:
        setting, equals, rest = str(error).partition(" = ")
        if setting not in names:
            raise
        raise type(error)(f"{names[setting]}{equals}{rest}") from error


def check_callback(name: str, value: Any, arguments: str) -> None:
    """Check that a value is None or a function that accepts these arguments.

    The check comes first because the first call may be hours after the start of the run.

    Args:
        arguments: names of the positional arguments, separated by ", ".
    """
    if value is None:
        return
    if not callable(value):
        raise ConfigError(f"{name} must be a function or None, got {value!r:.80}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        raise ConfigError(
            f"{name} must be a function of ({arguments}), got a function of {signature}: {error}"
        ) from None
