"""Write docs/commands.md from the help texts of the command line, or check it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer
from generated_page import escape_cell, make_table, write_or_check_page

from ludus.services.cli.app import app

INTRODUCTION = """# Commands

All commands with their arguments and options, as in `ludus COMMAND --help`. A message about a \
mistake of the user goes to stderr, and the exit code is then 2; another failure has 1, and a stop \
by Ctrl-C 130.

This page is generated: `.venv/bin/python dev/commands_docs.py`.
"""
_PLACEHOLDERS = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH"}


def make_page() -> str:
    """Return the text of the page."""
    return INTRODUCTION + "".join(_describe_group(typer.main.get_command(app), "ludus"))


def _describe_group(group: Any, path: str) -> Iterator[str]:
    """Yield the sections of a command's subcommands, or of the command without subcommands."""
    if not hasattr(group, "commands"):
        yield _describe_command(group, path)
        return
    if group.invoke_without_command:
        yield _describe_command(group, path)
    for name, command in group.commands.items():
        yield from _describe_group(command, f"{path} {name}")


def _describe_command(command: Any, path: str) -> str:
    arguments = [
        _format_argument(parameter) for parameter in command.params if _is_argument(parameter)
    ]
    usage = " ".join([path, *arguments])
    help_text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or ""))
    section = f"\n## {path}\n\n`{usage}`\n\n{help_text}\n"
    rows = [_make_row(parameter) for parameter in command.params if parameter.name != "help"]
    if rows:
        section += "\n" + make_table(
            ("argument or option", "value", "default", "description"), *rows
        )
    return section


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _format_argument(parameter: Any) -> str:
    name = str(getattr(parameter, "metavar", None) or parameter.name)
    name = name.upper() if name.islower() else name
    if parameter.required:
        return name
    return name if name.startswith("[") and name.endswith("]") else f"[{name}]"


def _make_row(parameter: Any) -> tuple[str, ...]:
    names = [_format_argument(parameter)] if _is_argument(parameter) else list(parameter.opts)
    value = "" if _is_argument(parameter) else _format_value(parameter)
    help_text = str(getattr(parameter, "help", None) or "")
    cells = (", ".join(f"`{name}`" for name in names), value, _format_default(parameter), help_text)
    return tuple(escape_cell(cell) for cell in cells)


def _format_value(parameter: Any) -> str:
    if parameter.is_flag:
        return ""
    if parameter.metavar:
        return f"`{parameter.metavar}`"
    type_name = str(parameter.display_type(None)).strip("<>")
    type_name = type_name.removeprefix("list[").removesuffix("]").removesuffix(" range")
    if "|" in type_name:
        return " or ".join(f"`{choice}`" for choice in type_name.split("|"))
    return f"`{_PLACEHOLDERS[type_name.lower()]}`"


def _format_default(parameter: Any) -> str:
    shown_default = getattr(parameter, "show_default", None)
    if isinstance(shown_default, str):
        return shown_default
    if parameter.required:
        return "required"
    is_hidden = not shown_default or getattr(parameter, "is_flag", False)
    default = "" if is_hidden else _get_text(parameter.default)
    return f"`{default}`" if default else ""


def _get_text(value: Any) -> str:
    if value is None or callable(value) or "Sentinel" in repr(value):
        return ""
    return str(value.value if isinstance(value, Enum) else value)


if __name__ == "__main__":
    write_or_check_page("commands.md", make_page())
