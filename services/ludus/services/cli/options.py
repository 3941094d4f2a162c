"""`key=value` options of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.proto.values import parse_value


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` options; a value is JSON, TOML or text."""
    parsed_options: dict[str, Any] = {}
    for option in options:
        key, separator, value_text = option.partition("=")
        if not separator or not key.strip():
            raise ConfigError(
                f"--option must be KEY=VALUE, got '{option}'; for example --option game=blackjack"
            )
        parsed_options[key.strip()] = parse_value(value_text, f"--option {key.strip()}")
    return parsed_options
