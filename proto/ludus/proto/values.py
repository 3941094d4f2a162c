"""Values on a command line. This module does not import the configuration, so it loads fast."""

from __future__ import annotations

from typing import Any

from ludus.proto.documents import DocumentError, DocumentLimitError, parse_json, parse_toml
from ludus.proto.errors import ConfigError


def parse_value(text: str, field: str) -> Any:
    """Return the value of a field: parsed as JSON if possible, then as TOML, otherwise the text.

    Raises:
        ConfigError: the text starts like a list or a section, but is neither JSON nor TOML, or
            exceeds a limit of documents.
    """
    try:
        return _parse_text(text)
    except DocumentLimitError as error:
        raise ConfigError(
            f"{field:.200}: the value {text:.40}... cannot be used: {error}"
        ) from None
    except DocumentError as error:
        raise ConfigError(
            f"{field:.200} must be a value in JSON or TOML, got '{text:.200}': {error}; for example"
            """ '[{"weight": 1.0}]', '[{weight = 1.0}]', or '"[a text]"' in quotes"""
        ) from None


def _parse_text(text: str) -> Any:
    try:
        return parse_json(text)
    except DocumentLimitError:
        raise
    except DocumentError:
        pass
    if not text.lstrip().startswith(("[", "{", "'", '"')):
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except DocumentLimitError:
        raise
    except DocumentError:
        if text.lstrip().startswith(("'", '"')):
            return text
        raise
