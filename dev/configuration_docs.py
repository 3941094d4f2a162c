"""Write docs/configuration.md from the help texts of the configuration, or check it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from generated_page import escape_cell, write_or_check_page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ludus.proto.config import RecordedRun
from ludus.proto.config.mistakes import find_sections

INTRODUCTION = """# Configuration of a run

A configuration is a TOML, YAML or JSON file. The top-level field `kind` selects one of three \
kinds of runs:

| kind | trains | sections |
|---|---|---|
| `language_model` (default) | a language model | [language-model run](#language-model-run) |
| `network` | torch modules, by [classic PPO](classic.md) | [network run](#network-run) |
| `sft` | a language model, on [conversations](sft.md) | [fine-tuning run](#fine-tuning-run) |

The command line can set every field: `ludus train FILE --set training.num_steps=20`, or \
`ludus sft` for a fine-tuning run. A list of sections, such as `rewards`, is set as a whole, as \
JSON or TOML. \
`null` is a value in YAML, in JSON and after `--set` (`--set training.checkpoint_every_s=null`); \
TOML has no such value. \
`--dry-run` checks a run and shows what it would do; with `--json`, it prints every setting. An \
unknown key or an impossible combination is an error before anything starts.

A file with one environment has section `[environment]`, and the command line sets \
`environment.max_turns=5`. Several environments have sections `[environments.NAME]`, and the \
command line sets `environments.NAME.max_turns=5`. The tables below list these fields with the \
second notation. A file has one of the two.

This page is generated: `.venv/bin/python dev/configuration_docs.py`.
"""
_HEADINGS = {
    "language_model": "Language-model run",
    "network": "Network run",
    "sft": "Fine-tuning run",
}


def make_page() -> str:
    """Return the text of the page."""
    page = INTRODUCTION
    for run_model in find_sections(RecordedRun):
        kind = run_model.model_fields["kind"].default
        page += "".join(describe_section(_HEADINGS[kind], run_model, "", level=2))
    return page


def describe_section(
    title: str, section: type[BaseModel], prefix: str, level: int, help_text: str = ""
) -> Iterator[str]:
    """Yield the heading and the table of a section, and of the sections in it.

    Args:
        prefix: prefix of the names of the fields.
        help_text: description of the field that contains the section.
    """
    summary = " ".join((section.__doc__ or "").strip().split("\n\n")[0].split())
    paragraphs = [f"{'#' * level} {title}", *([help_text] if help_text else []), summary]
    yield "".join(f"\n{paragraph}\n" for paragraph in paragraphs)
    yield "\n| field | type | default | description |\n|---|---|---|---|\n"
    children: list[tuple[str, type[BaseModel], str]] = []
    for name, field in section.model_fields.items():
        models = list(find_sections(field.annotation))
        if models:
            path = f"{prefix}{name}.NAME" if _is_mapping(field.annotation) else f"{prefix}{name}"
            children += [(path, model, _format_help(field)) for model in models]
            continue
        if name == "kind" and prefix:  # the heading names it
            continue
        cells = (_format_type(field.annotation), _format_default(field), _format_help(field))
        yield f"| `{prefix}{name}` | {' | '.join(cells)} |\n"
    for path, model, field_help in children:
        kind = model.model_fields.get("kind")
        label = f"{path}, kind = {kind.default}" if kind else path
        yield from describe_section(label, model, f"{path}.", 3, field_help)


def _is_mapping(annotation: Any) -> bool:
    """Return whether a field contains sections by name."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_origin(annotation) is dict


def _format_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _format_type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_format_type(argument) for argument in arguments)
    if annotation is type(None):
        return "null"
    if annotation is Path:
        return "str"
    if is_dataclass(annotation):
        return "section"
    if origin is tuple:
        return "list"
    return getattr(origin or annotation, "__name__", str(annotation))


def _format_default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{_format_constant(value)}`"


def _format_constant(value: Any) -> str:
    return "null" if value is None else '""' if value == "" else str(value)


def _format_help(field: FieldInfo) -> str:
    return escape_cell(field.description or "")


if __name__ == "__main__":
    write_or_check_page("configuration.md", make_page())
