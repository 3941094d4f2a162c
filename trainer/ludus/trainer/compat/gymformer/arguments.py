"""Arguments of Gymformer's calls: each is what it should be, or is refused by its name."""

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


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """Check that it is a whole number of so many or more; numpy's are some, too."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} expected at least {least}, as a whole number, got {value!r:.80}")


def check_number(name: str, value: Any) -> None:
    """Check that it is a finite number of 0 or more."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name} expected a finite number of 0 or more, got {value!r:.80}")


def check_flag(name: str, value: Any) -> None:
    """Check that it is True or False: a text that says no would count as yes."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} expected True or False, got {value!r:.80}")


def check_run_name(name: Any) -> None:
    """Check that a run and its folder may be called so; None is taken."""
    if name is not None and not (isinstance(name, str) and re.fullmatch(RUN_NAME_PATTERN, name)):
        raise ConfigError(
            "name expected up to 47 letters, digits, '.', '_' and '-', of which the first is a "
            f"letter or a digit, got {name!r:.80}"
        )


def path_in(name: str, value: Any) -> str:
    """The path, or the id of a model, that an argument is."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} expected a path, got {value!r:.80}")
    return os.fspath(value)


def folder_in(name: str, value: Any) -> Path:
    """The folder that an argument names, which is there or can be made."""
    folder = Path(path_in(name, value))
    there = next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder)
    if there.exists() and not there.is_dir():
        raise ConfigError(f"{name} = '{folder}' expected a folder, but '{there}' is a file")
    return folder


def device_in(name: str, value: Any) -> str | None:
    """The name of a device on which torch computes here; None stays None."""
    if value is None:
        return None
    if not isinstance(value, (str, torch.device)):
        raise ConfigError(f"{name} expected None or a text such as 'cpu', got {value!r:.80}")
    try:
        torch.empty(0, device=value)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{name} = '{value}' cannot be used: {str(error).splitlines()[0]:.200}; take 'cpu', "
            f"or a GPU of this machine, which has {torch.cuda.device_count()}"
        ) from None
    return str(value)


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors of the block begin with the name of an argument, in place of a setting's."""
    try:
        yield
    except (ConfigError, NotFoundError) as error:
        setting, equals, rest = str(error).partition(" = ")
        if setting not in names:
            raise
        raise type(error)(f"{names[setting]}{equals}{rest}") from error


def check_callback(name: str, value: Any, arguments: str) -> None:
    """Check that it is None, or a function that can be called so: hours before its first call.

    Args:
        arguments: their names, between commas.
    """
    if value is None:
        return
    if not callable(value):
        raise ConfigError(f"{name} expected a function or None, got {value!r:.80}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return  # of builtins, some say nothing
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        raise ConfigError(
            f"{name} expected a function of ({arguments}), got one of {signature}: {error}"
        ) from None
