"""Writes docs/configuration.md from the configuration's own help texts, or checks it."""

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

from ludus.proto.config import RunConfig
from ludus.proto.config.load import models_in

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRODUCTION = """# Configuration of a run

Written in TOML, YAML or JSON; every field can be set on the command line:
`ludus train FILE --set training.num_steps=20`. `--dry-run` prints what comes out. An unknown
key or an impossible combination ends with a message before anything starts.

This page is generated: `.venv/bin/python dev/configuration_docs.py`.
"""


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_section("run", RunConfig, ""))


def _section(title: str, section: type[BaseModel], prefix: str) -> Iterator[str]:
    summary = (section.__doc__ or "").strip().splitlines()[0]
    yield f"\n## {title}\n\n{summary}\n\n| field | type | default | |\n|---|---|---|---|\n"
    nested: list[tuple[str, type[BaseModel]]] = []
    for name, field in section.model_fields.items():
        models = list(models_in(field.annotation))
        if models:
            nested += [(f"{prefix}{name}", model) for model in models]
            continue
        if name == "kind":  # it stands in the heading
            continue
        kinds = _type(field.annotation)
        yield f"| `{prefix}{name}` | {kinds} | {_default(field)} | {_help(field)} |\n"
    for path, model in nested:
        kind = model.model_fields.get("kind")
        label = f"{path}, kind = {kind.default}" if kind else path
        yield from _section(label, model, f"{path}.")


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if annotation is type(None):
        return "null"
    if origin is tuple:
        return "list"
    return getattr(origin or annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return f"`{list(value) if isinstance(value, tuple) else 'null' if value is None else value}`"


def _help(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on drift")
    if not parser.parse_args().check:
        TARGET.write_text(page(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != page():
        sys.exit("docs/configuration.md is stale; run dev/configuration_docs.py")
