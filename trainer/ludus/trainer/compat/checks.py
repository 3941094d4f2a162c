"""Checks and calls that the three layers share. Errors use the names of the user's script."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from torch import nn

from ludus.proto import paths
from ludus.proto.errors import ConfigError, NotFoundError

ResultT = TypeVar("ResultT")

PathText = Annotated[paths.PathText, Field(description="a path")]
Text = Annotated[str, Field(description="a text")]
Share = Annotated[float, Field(gt=0, le=1)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]
Penalty = Annotated[float, Field(ge=0.01, le=100)]
Network = Annotated[InstanceOf[nn.Module], Field(description="a torch module")]
_MAX_NAME_CHARS = 40
_BOUNDS = {Gt: " above {}", Ge: " of {} or more", Lt: ", below {}", Le: ", at most {}"}


def check_value(
    name: str, value_type: Any, value: Any, *, strict: bool = True, alternative: str = ""
) -> Any:
    """Convert a value to a type and return it. NumPy numbers are accepted.

    Args:
        name: name of the value in errors.
        value_type: type of the value, which may have pydantic's limits.
        strict: whether to refuse a text such as "3" if a number is needed.
        alternative: description of a further valid value, for the error.

    Raises:
        ConfigError: the value has another type or is out of range.
    """
    plain_value = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain_value, os.PathLike):
        plain_value = os.fspath(plain_value)
    is_strict = strict or value_type is bool or isinstance(plain_value, bool)
    try:
        return _make_adapter(value_type).validate_python(plain_value, strict=is_strict or None)
    except ValidationError:
        raise ConfigError(
            f"{name} = {value!r:.80} must be {_describe_type(value_type)}{alternative}"
        ) from None


@cache
def _make_adapter(value_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(value_type, config=ConfigDict(allow_inf_nan=False))


def _describe_type(value_type: Any) -> str:
    """Describe the values of a type: "a number above 0, at most 1"."""
    if value_type in (bool, NoneType):
        return "True or False" if value_type is bool else "None"
    if get_origin(value_type) in (Union, UnionType):
        return ", or ".join(map(_describe_type, get_args(value_type)))
    if get_origin(value_type) is Literal:
        return f"one of {', '.join(map(str, get_args(value_type)))}"
    base_type, *annotations = get_args(value_type) or (value_type,)
    fields = [annotation for annotation in annotations if isinstance(annotation, FieldInfo)]
    description = next((field.description for field in fields if field.description), None)
    number_text = "a whole number" if base_type is int else "a number"
    bounds = (
        _BOUNDS[type(bound)].format(*astuple(bound)) for field in fields for bound in field.metadata
    )
    return description or number_text + "".join(bounds)


def check_function(
    name: str, function: Any, parameters: tuple[str, ...], *, by_name: bool = False
) -> None:
    """Check that a function accepts these arguments, because its first call may be hours later."""
    expectation = f"{name} must be a function of ({', '.join(parameters)})"
    if not callable(function):
        raise ConfigError(f"{expectation}, got {function!r:.80}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    try:
        if by_name:
            signature.bind(**dict.fromkeys(parameters))
        else:
            signature.bind(*parameters)
    except TypeError as error:
        raise ConfigError(
            f"{expectation}, got a function of {signature}: {error}; change its parameters"
        ) from None


def require_folder(name: str, value: Any) -> Path:
    """Return the path of a folder that exists or can be created."""
    folder = Path(check_value(name, PathText, value))
    ancestors = (folder, *folder.absolute().parents)
    ancestor = next((path for path in ancestors if path.exists()), folder)
    if ancestor.exists() and not ancestor.is_dir():
        raise ConfigError(f"{name} = '{folder}' must be a folder, but '{ancestor}' is a file")
    return folder


def require_device(value: Any) -> str | None:
    """Return the name of a torch device of this machine; None stays None."""
    if value is None:
        return None
    if not isinstance(value, (str, torch.device)):
        raise ConfigError(f"device = {value!r:.80} must be None or a string such as 'cpu'")
    try:
        torch.empty(0, device=value)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device = '{value}' cannot be used: {str(error).splitlines()[0]:.200}; use 'cpu' "
            f"or a GPU of this machine ({torch.cuda.device_count()} available)"
        ) from None
    return str(value)


@contextmanager
def rename_in_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Rename settings in errors of the block ("setting = value"). `names`: argument by setting."""
    try:
        yield
    except (ConfigError, NotFoundError) as error:
        text = re.sub(r"[\w.]+(?= = )", lambda match: names.get(match[0], match[0]), str(error))
        if text == str(error):
            raise
        raise type(error)(text) from error


def make_run_name(text: str, default: str) -> str:
    """Return a text as the name of a run, without characters that the name cannot contain."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:_MAX_NAME_CHARS] or default


def run_coroutine(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run the coroutine and return its result, even inside a running event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return ThreadPoolExecutor(1, "training").submit(asyncio.run, coroutine).result()
