"""`key=value` options of the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ludus.proto.errors import ConfigError


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """What `key=value` options say; a value is read as JSON, else as text."""
    parsed: dict[str, Any] = {}
    for option in options:
        key, separator, raw = option.partition("=")
        if not separator or not key.strip():
            raise ConfigError(
                f"--option expected key=value, got '{option}'; for example --option game=blackjack"
            )
        try:
            parsed[key.strip()] = json.loads(raw)
        except json.JSONDecodeError:
            parsed[key.strip()] = raw
    return parsed
