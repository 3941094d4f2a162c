"""Values on a command line. This module does not import the configuration, so it loads fast."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from ludus.proto.errors import ConfigError


def parse_value(text: str, field: str) -> Any:
    """Return the value of a field: parsed as JSON if possible, then as TOML, otherwise the text.

    Raises:
        ConfigError: the text starts like a list or a section, but is neither JSON nor TOML.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    if not text.lstrip().startswith(("[", "{", "'", '"')):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.lstrip().startswith(("'", '"')):
            return text
        raise ConfigError(
            f"{field} must be a value in JSON or TOML, got '{text}': {error}; for example"
            """ '[{"weight": 1.0}]', '[{weight = 1.0}]', or '"[a text]"' in quotes"""
        ) from None
