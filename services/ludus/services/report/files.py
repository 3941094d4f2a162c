"""Pages from the templates in this folder, and files that are written completely or not at all."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import jinja2

from ludus.env.text.terminal import clean_for_terminal
from ludus.proto.errors import ConfigError
from ludus.services import display, numbers


def render_template(template: str, **context: object) -> str:
    """Return a template's text with the values of `context`."""
    jinja_environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    jinja_environment.globals["display"] = display
    jinja_environment.filters |= {
        # Completions of a model may contain any character, and HTML has no control characters.
        "visible": partial(clean_for_terminal, keep_newlines=True),
        "with_commas": "{:,}".format,
        "percent": numbers.format_percent,
        "percent_interval": numbers.format_percent_interval,
        "fixed": numbers.format_fixed,
        "fixed_interval": numbers.format_fixed_interval,
    }
    return jinja_environment.get_template(template).render(**context)


def write_atomically(path: Path, content: str, *, option: str = "--output") -> Path:
    """Write a file so that readers see either all of it or nothing, and return its path.

    Args:
        option: option of the command line that names the file, for messages.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Names of files may contain bytes that are not UTF-8.
        temporary_path.write_text(content, encoding="utf-8", errors="backslashreplace")
        temporary_path.replace(path)
    except OSError as error:
        temporary_path.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write '{path}': {error.strerror}; choose another path with {option}"
        ) from None
    return path
