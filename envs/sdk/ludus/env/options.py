"""Options of an environment, declared as a model, and messages about invalid values.

    class CoinOptions(EnvironmentOptions):
        num_flips: int = Field(10, ge=1)
        \"\"\"Number of flips in an episode.\"\"\"

    CoinEnvironment(num_flips=3)                       the environment's constructor
    python -m coin_env.server.app --num-flips 3        the command line of its server
    COIN_NUM_FLIPS=3                                   its environment variables
    format_option_table(CoinOptions)                   the table in its README

The docstring under a field is its help text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter, isclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from ludus.env.types import JsonObject
from ludus.proto.documents import DocumentError, parse_json
from ludus.proto.errors import ConfigError, did_you_mean

_REWORDINGS = {
    "Input should be": "expected",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""Replacements of phrases in pydantic's messages."""


_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    list: "list",
    tuple: "list",
    dict: "JSON object",
}
"""Descriptions of types for people."""


class EnvironmentOptions(BaseModel):
    """Base class of every environment's options.

    The class name without "Options" is the prefix of the environment variables.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    variable_suffixes: ClassVar[Mapping[str, str]] = {}
    """Suffixes of variables whose names differ from their options, by option."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, is_text: bool = False) -> Self:
        """Return the options with these values.

        With `is_text`, every option may be text, as on a command line.

        Raises:
            ConfigError: an option is unknown, has the wrong type or is out of range.
        """
        if is_text:
            list_names = {option.name for option in list_options(cls) if option.is_list}
            values = {
                name: value.split() if isinstance(value, str) and name in list_names else value
                for name, value in values.items()
            }
        try:
            return cls.model_validate(values, strict=False if is_text else None)
        except ValidationError as error:
            raise ConfigError(explain_errors(error, cls.model_fields)) from None

    def to_json(self) -> JsonObject:
        """Return all options by name, as JSON values."""
        return self.model_dump(mode="json")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of an environment, as shown in help texts and documentation."""

    name: str
    variable: str
    """Environment variable that sets the option."""
    help: str
    default: str
    """The default as text; "" if there is none or if it is empty."""
    is_list: bool
    is_switch: bool
    type_text: str = ""
    """Kind of values, for example "integer" or "compact or rules"; "" if unknown."""


def make_variable_name(options_type: type[EnvironmentOptions], option: str) -> str:
    """Return the name of the environment variable that sets an option."""
    prefix = options_type.__name__.removesuffix("Options")
    suffix = options_type.variable_suffixes.get(option, option)
    return f"{prefix}_{suffix}".upper()


def list_options(options_type: type[EnvironmentOptions]) -> list[Option]:
    """Return the options in the order of their declaration."""
    return [
        Option(
            name=name,
            variable=make_variable_name(options_type, name),
            help=" ".join((field.description or "").split()),
            default=format_default(field.get_default(call_default_factory=True)),
            is_list=get_origin(field.annotation) is tuple,
            is_switch=field.annotation is bool,
            type_text=describe_type(field.annotation),
        )
        for name, field in options_type.model_fields.items()
    ]


def list_parameters(function: Callable[..., Any]) -> list[Option]:
    """Return the parameters of a class or function that makes environments, as options.

    `self`, positional-only parameters and `**options` are left out.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
        annotations = get_type_hints(function.__init__ if isclass(function) else function)
    except Exception:  # noqa: BLE001 - third-party signatures may not be readable
        return []
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [
        Option(
            name=parameter.name,
            variable="",
            help="",
            default=format_default(parameter.default),
            is_list=False,
            is_switch=False,
            type_text=_describe_parameter(parameter, annotations),
        )
        for parameter in parameters
        if parameter.kind in kinds
    ]


def _describe_parameter(parameter: Parameter, annotations: Mapping[str, Any]) -> str:
    """Describe the type of a parameter by its annotation, or otherwise by its default."""
    if parameter.name in annotations:
        return describe_type(annotations[parameter.name])
    has_default = parameter.default not in (Parameter.empty, None)
    return describe_type(type(parameter.default)) if has_default else ""


def describe_type(annotation: Any) -> str:
    """Describe the values of a type for people; "" if the type has no description."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is Annotated:
        return describe_type(arguments[0])
    if origin in (Union, UnionType):
        descriptions = [describe_type(argument) for argument in arguments]
        return " or ".join(description for description in descriptions if description)
    return _TYPE_NAMES.get(origin or annotation, "")


def format_option_table(options_type: type[EnvironmentOptions]) -> str:
    """Return the Markdown table of the options."""
    lines = ["| option | variable | default | |", "|---|---|---|---|"]
    for option in list_options(options_type):
        default = f"`{option.default}`" if option.default else ""
        lines.append(f"| `{option.name}` | `{option.variable}` | {default} | {option.help} |")
    return "\n".join(lines)


def format_default(default: Any) -> str:
    """Return a default as text; "" if there is none or if it is empty."""
    if default in (PydanticUndefined, Parameter.empty, None, "", (), {}):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _parse_object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except DocumentError as error:
        raise ValueError(f"expected a JSON object, got {value!r:.80}: {error}") from None


JsonOption = Annotated[dict[str, Any], BeforeValidator(_parse_object)]
"""A JSON object, which may be given as text."""


def explain_errors(error: ValidationError, fields: Iterable[str] = ()) -> str:
    """Return one sentence per invalid field, with its value.

    If the names of all `fields` are given, the sentence about an unknown name has a hint.
    """
    names = list(fields)
    return "; ".join(_explain_fault(fault, names) for fault in error.errors(include_url=False))


def _explain_fault(fault: ErrorDetails, fields: list[str]) -> str:
    field = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden" and fields:
        hint = did_you_mean(field, fields) or f"expected one of {', '.join(fields)}"
        return f"unknown option '{field}'; {hint}"
    if fault["type"] == "missing":
        return f"{field} is required"
    message = fault["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    for phrase, replacement in _REWORDINGS.items():
        message = message.replace(phrase, replacement)
    input_clause = "" if "got " in message else f", got {fault['input']!r:.80}"
    prefix = f"{field}: " if field else ""
    return f"{prefix}{message[0].lower()}{message[1:]}{input_clause}"
