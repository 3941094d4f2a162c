"""Forge's YAML: a tree with attribute access, whose `${...}` references are resolved on access.

file or mapping --load_forge_config--> ForgeConfig --edits, overrides--> ForgeKeys --> mapping.py

cfg = load_forge_config("blackjack.yaml")
cfg.blackjack_env.server_url = "http://localhost:8005"
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.proto.config import apply_overrides
from ludus.proto.documents import DocumentError, read_yaml
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import parse_path
from ludus.trainer.compat.forge.keys import check_key, find_older_key

LUDUS_SECTION = "ludus"
"""Section with fields of a run, which override the values of Forge's keys."""
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_VARIABLE_PREFIX = "oc.env:"
_MAX_DEPTH = 10
"""Maximum nesting of references. Deeper nesting is treated as a cycle."""


class ForgeConfig(dict[str, Any]):
    """A section of Forge's configuration, whose keys are also attributes."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        """Copy the sections of the tree."""
        super().__init__()
        for key, value in tree.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, ForgeConfig(value) if isinstance(value, Mapping) else value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; set it to `default` first if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def __getattr__(self, key: str) -> Any:
        if key not in self:
            raise AttributeError(f"this section has no key '{key}'; it has {sorted(self)}")
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


def load_forge_config(
    source: Path | str | Mapping[str, Any], overrides: Sequence[str] = ()
) -> ForgeConfig:
    """Load a YAML file, or copy a mapping, and apply `a.b=value` overrides."""
    if not isinstance(source, (str, Path, Mapping)):
        raise ConfigError(
            "the configuration must be the path of a YAML file or a mapping of its sections, got "
            f"{source!r:.80}"
        )
    config = ForgeConfig(source if isinstance(source, Mapping) else _read_yaml(parse_path(source)))
    apply_overrides(config, overrides)
    return config


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        tree = read_yaml(path)
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no file '{path}'; examples/tutorial contains the file of Forge's tutorial"
        ) from None
    except (OSError, DocumentError) as error:
        raise ConfigError(f"'{path}' cannot be read: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"'{path}' must contain sections with keys, got {type(tree).__name__}")
    return tree


class ForgeKeys:
    """The values of a configuration by dotted key. It records the keys that are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Flatten the configuration without section `ludus`."""
        self._config = config
        self._values = {
            key: value
            for key, value in _flatten(config, "")
            if not key.startswith(f"{LUDUS_SECTION}.")
        }
        self._read_keys: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def unread_keys(self) -> list[str]:
        """Keys that have not been read, in file order."""
        return [key for key in self._values if key not in self._read_keys]

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the common value of several keys; `default` if none is set."""
        values: dict[str, Any] = {}
        for key in keys:
            for name in (key, find_older_key(key)):
                if name is None or self._values.get(name) is None:
                    continue
                value = self._resolve(name, self._values[name])
                values[name] = check_key(key, value, source_key=self._find_source_key(name))
        self._read_keys.update(keys, values)
        first_value = next(iter(values.values()), default)
        if any(value != first_value for value in values.values()):
            pairs = ", ".join(f"{key} = {value!r}" for key, value in values.items())
            raise ConfigError(f"{pairs}: these keys have the same meaning; make them equal")
        return first_value

    def mark_read_if_true(self, *keys: str) -> None:
        """Mark keys as read whose value is true, because Ludus always behaves that way."""
        self._read_keys.update(key for key in keys if self._values.get(key) is True)

    def _find_source_key(self, key: str) -> str:
        """Return the key that a reference points to, or the key itself."""
        for _ in range(_MAX_DEPTH):
            match = _REFERENCE.fullmatch(str(self._values[key]))
            if match is None or match[1] not in self._values:
                break
            key = match[1]
        return key

    def _resolve(self, key: str, value: Any, depth: int = 0) -> Any:
        """Return the value of a key with every `${...}` replaced by the value it refers to."""
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth == _MAX_DEPTH:
            raise ConfigError(f"{key} = '{value}' refers to itself")
        match = _REFERENCE.fullmatch(value)
        if match:
            return self._resolve(key, self._look_up(key, match[1]), depth + 1)
        resolved_text = _REFERENCE.sub(lambda match: str(self._look_up(key, match[1])), value)
        return self._resolve(key, resolved_text, depth + 1)

    def _look_up(self, key: str, reference: str) -> Any:
        if reference.startswith(_VARIABLE_PREFIX):
            name, has_default, default = reference.removeprefix(_VARIABLE_PREFIX).partition(",")
            variable_value = os.environ.get(name.strip(), default.strip() if has_default else None)
            if variable_value is None:
                raise ConfigError(
                    f"{key}: the environment variable {name.strip()} is not set; set it, or write "
                    f"${{{_VARIABLE_PREFIX}{name.strip()},default}}"
                )
            return variable_value
        node: Any = self._config
        for segment in reference.strip().split("."):
            if not isinstance(node, Mapping) or segment not in node:
                raise ConfigError(f"{key}: '${{{reference}}}' refers to a key that does not exist")
            node = node[segment]
        return node


def _flatten(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
