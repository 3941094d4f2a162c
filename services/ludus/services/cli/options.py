"""`key=value` options of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.proto.values import parse_value


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """What `key=value` options say; a value is read as JSON or TOML, else as text."""
    parsed: dict[str, Any] = {}
    for option in options:
        key, separator, raw = option.partition("=")
        if not separator or not key.strip():
            raise ConfigError(
                f"--option expected key=value, got '{option}'; for example --option game=blackjack"
            )
        parsed[key.strip()] = parse_value(raw, f"--option {key.strip()}")
    return parsed
