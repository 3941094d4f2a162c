"""Write docs/configuration.md from the help texts of the configuration, or check it."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ludus.proto.config import RecordedRun
from ludus.proto.config.load import find_sections

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRODUCTION = """# Configuration of a run

A configuration is a TOML, YAML or JSON file. The top-level field `kind` selects one of three \
kinds of runs:

| kind | trains | sections |
|---|---|---|
| `language_model` (default) | a language model | [language-model run](#language-model-run) |
| `network` | torch modules, by [classic PPO](classic.md) | [network run](#network-run) |
| `sft` | a language model, on [conversations](sft.md) | [fine-tuning run](#fine-tuning-run) |

The command line can set every field: `ludus train FILE --set training.num_steps=20`, or \
`ludus sft` for a fine-tuning run. \
`--dry-run` checks a run and shows what it would do; with `--json`, it prints every setting. An \
unknown key or an impossible combination is an error before anything starts.

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
        page += "".join(_describe_section(_HEADINGS[kind], run_model, "", level=2))
    return page


def _describe_section(
    title: str, section: type[BaseModel], prefix: str, level: int
) -> Iterator[str]:
    summary = " ".join((section.__doc__ or "").strip().split("\n\n")[0].split())
    yield f"\n{'#' * level} {title}\n\n{summary}\n\n"
    yield "| field | type | default | description |\n|---|---|---|---|\n"
    children: list[tuple[str, type[BaseModel]]] = []
    for name, field in section.model_fields.items():
        models = list(find_sections(field.annotation))
        if models:
            children += [(f"{prefix}{name}", model) for model in models]
            continue
        if name == "kind" and prefix:  # the heading names it
            continue
        cells = (_format_type(field.annotation), _format_default(field), _format_help(field))
        yield f"| `{prefix}{name}` | {' | '.join(cells)} |\n"
    for path, model in children:
        kind = model.model_fields.get("kind")
        label = f"{path}, kind = {kind.default}" if kind else path
        yield from _describe_section(label, model, f"{path}.", level=3)


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
    if origin is tuple:
        return "list"
    return getattr(origin or annotation, "__name__", str(annotation))


def _format_default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return f"`{list(value) if isinstance(value, tuple) else 'null' if value is None else value}`"


def _format_help(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Do not write; fail on differences.")
    if not parser.parse_args().check:
        TARGET.write_text(make_page(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != make_page():
        sys.exit("docs/configuration.md is out of date; run dev/configuration_docs.py")
