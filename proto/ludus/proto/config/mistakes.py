"""Descriptions of the mistakes in a run configuration, with the name that users write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from ludus.proto.config.run import AnyRunConfig
from ludus.proto.config.section import IMPORT_PATTERN, ROLLOUT_PATTERN, RUN_NAME_PATTERN
from ludus.proto.errors import did_you_mean

_MAX_SHOWN_CHARS = 200
"""Maximum length of a value or key in an error message."""
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list in square brackets",
    "list": "a list in square brackets",
    "dict": "a section with fields",
    "model": "a section with fields",
}
"""Expectations of values of the wrong type, by the first word of the type of pydantic's error."""
_TYPE_REASONS = ("type", "parsing", "from_float", "attributes_type")
"""Other words of the types of these errors."""

_FORMS = {
    RUN_NAME_PATTERN: "1 to 47 letters, digits, '.', '_' or '-', first a letter or a digit",
    IMPORT_PATTERN: "module:function, for example my_rewards:score",
    ROLLOUT_PATTERN: "module:function or RUNNER:module:function",
}
"""Descriptions of the patterns of texts."""


def explain_mistake(mistake: ErrorDetails) -> str:
    """Describe one mistake in a line of the error message."""
    location = [str(key)[:_MAX_SHOWN_CHARS] for key in mistake["loc"]]
    path, sections, variants = _name_field(location, list(find_sections(AnyRunConfig)))
    value = mistake["input"]
    match mistake["type"]:
        case "extra_forbidden":
            return f"  {path}: unknown key{_suggest_key(path, location[-1], sections, variants)}"
        case "missing":
            return f"  {path}: required, but not set"
        case "value_error":
            prefix = f"{path}: " if path else ""
            return f"  {prefix}{mistake['msg'].removeprefix('Value error, ')}"
        case "union_tag_invalid":
            path, value = f"{path}.kind" if path else "kind", value.get("kind")
    return f"  {path}: {_describe_expectation(mistake)}, got {_shorten(value)}{_hint(mistake)}"


def find_sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the configuration sections that a field of this type may contain."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from find_sections(argument)


def _describe_expectation(mistake: ErrorDetails) -> str:
    """Return a clause with the expected values."""
    error_type, context = mistake["type"], mistake.get("ctx") or {}
    if error_type == "union_tag_invalid":
        return f"expected one of {context['expected_tags']}"
    if error_type == "string_pattern_mismatch":
        pattern = context["pattern"]
        return f"expected {_FORMS.get(pattern, f'text of the form {pattern}')}"
    type_name, _, reason = error_type.partition("_")
    if type_name in _TYPES and reason in _TYPE_REASONS:
        return f"expected {_TYPES[type_name]}"
    message = mistake["msg"].replace("Input should be '", "expected '")
    message = message.replace("Input should be", "expected a value")
    return f"{message[0].lower()}{message[1:]}"


def _hint(mistake: ErrorDetails) -> str:
    """Return a hint at the choice that was meant; empty if no choice is similar."""
    value = mistake["input"]
    if isinstance(value, Mapping):
        value = value.get("kind")
    hint = did_you_mean(str(value), _list_choices(mistake.get("ctx") or {}))
    return f"; {hint}" if hint else ""


def _list_choices(context: Mapping[str, Any]) -> list[str]:
    """Return the values of which a mistake is none."""
    choices = context.get("expected_tags") or context.get("expected") or ""
    return re.findall(r"'([^']*)'", choices) if isinstance(choices, str) else []


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _name_field(
    location: Sequence[str], sections: list[type[BaseModel]]
) -> tuple[str, list[type[BaseModel]], list[type[BaseModel]]]:
    """Return a field's name as users write it, and the sections that may contain the field.

    The third value has the sections of all kinds. pydantic adds the kind of each variant to the
    location. Users do not write the kind there.
    """
    names: list[str] = []
    all_sections = sections
    for depth, key in enumerate(location):
        variants = [section for section in sections if _get_default_kind(section) == key]
        if variants and len(sections) > 1:
            sections = variants
            continue
        names.append(key)
        if not any(key in section.model_fields for section in sections):
            continue  # a key or an index in a field with several sections
        if depth < len(location) - 1:
            fields = [
                section.model_fields[key] for section in sections if key in section.model_fields
            ]
            sections = [model for field in fields for model in find_sections(field.annotation)]
            all_sections = sections
    return ".".join(names), sections, all_sections


def _suggest_key(
    path: str, key: str, sections: Sequence[type[BaseModel]], variants: Sequence[type[BaseModel]]
) -> str:
    """Return a hint at the kind that has the field, at a similar name, or all known names."""
    kinds = sorted(
        {str(_get_default_kind(section)) for section in variants if key in section.model_fields}
    )
    if kinds and sections:
        kind_field = f"{path.rpartition('.')[0]}.kind".removeprefix(".")
        return (
            f" of {kind_field} = '{_get_default_kind(sections[0])}'; set {kind_field} = "
            f"{' or '.join(map(repr, kinds))}, or remove the key"
        )
    names = {name for section in sections for name in section.model_fields}
    if "environments" in names:
        names.add("environment")
    return f"; {did_you_mean(key, names) or 'known keys: ' + ', '.join(sorted(names))}"


def _get_default_kind(section: type[BaseModel]) -> str | None:
    field = section.model_fields.get("kind")
    return None if field is None else str(field.default)
