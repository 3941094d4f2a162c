"""Values as they are typed on a command line; for programs that load no configuration, too."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from ludus.proto.errors import ConfigError


def parse_value(raw: str, field: str) -> Any:
    """What the command line gives a field: JSON, else a TOML value, else text.

    Raises:
        ConfigError: it begins as a list or a section does, but is neither in JSON nor in TOML.
    """
    try:
        return json.loads(raw)
    except json.JSONDecodeError:
        pass
    if not raw.lstrip().startswith(("[", "{", "'", '"')):
        return raw
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError as error:
        if raw.lstrip().startswith(("'", '"')):
            return raw
        raise ConfigError(
            f"{field} expected a value in JSON or TOML, got '{raw}': {error}; for example"
            """ '[{"weight": 1.0}]', '[{weight = 1.0}]', or '"[a text]"' in quotes"""
        ) from None
