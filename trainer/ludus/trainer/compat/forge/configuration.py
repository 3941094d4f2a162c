"""Forge's YAML as it is written: a tree with attributes, whose `${...}` are looked up when read.

file or mapping --load_forge_config--> ForgeConfig --changes, overrides--> Leaves --> mapping.py

cfg = load_forge_config("blackjack.yaml")
cfg.blackjack_env.server_url = "http://localhost:8005"
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ludus.proto.config import apply_overrides
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.compat.forge.values import checked

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_VARIABLE = "oc.env:"
_MAX_DEPTH = 10
"""References that refer to references: more are a circle."""


class ForgeConfig(dict[str, Any]):
    """A section of Forge's configuration: keys are attributes, too."""

    def __init__(self, tree: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for key, value in (tree or {}).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        is_section = isinstance(value, Mapping) and not isinstance(value, ForgeConfig)
        super().__setitem__(key, ForgeConfig(value) if is_section else value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is `default` where there was none."""
        if key not in self:
            self[key] = default
        return self[key]

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(
                f"this section has no key '{key}'; it has {sorted(self)}"
            ) from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


def load_forge_config(
    source: Path | str | Mapping[str, Any], overrides: Sequence[str] = ()
) -> ForgeConfig:
    """The configuration of a YAML file or of a mapping, a copy, after `a.b=value` overrides.

    Raises:
        NotFoundError: the file is not there.
        ConfigError: it cannot be read, or holds no sections.
    """
    if not isinstance(source, (str, Path, Mapping)):
        raise ConfigError(
            "the configuration expected the path of a YAML file, or a mapping of its sections, got "
            f"{source!r:.80}"
        )
    tree = source if isinstance(source, Mapping) else _read(Path(source))
    config = _copied(tree)
    apply_overrides(config, overrides)
    return config


def _copied(tree: Mapping[str, Any]) -> ForgeConfig:
    return ForgeConfig(
        {
            key: _copied(value) if isinstance(value, Mapping) else value
            for key, value in tree.items()
        }
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(
            f"no configuration at '{path}'; Forge's tutorial has one in examples/tutorial"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"'{path}' cannot be read: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"'{path}' expected sections with keys, got {type(tree).__name__}")
    return tree


class Leaves:
    """The values of a configuration by their dotted keys, and which of them were asked for."""

    def __init__(self, config: Mapping[str, Any], *, apart: str) -> None:
        """`apart` is a section that is not Forge's, and in which nothing is asked for."""
        self._config = config
        self._values = {
            key: value for key, value in _flat(config, "") if not key.startswith(f"{apart}.")
        }
        self._asked: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def unasked(self) -> list[str]:
        """The keys that nobody has asked for, in the order of the file."""
        return [key for key in self._values if key not in self._asked]

    def get(self, *keys: str) -> Any:
        """The value that these keys have, all of them asked for; None where none is set.

        Raises:
            ConfigError: they have several, one refers to what is not there, or one is none that
                the key can have (`values`).
        """
        self._asked.update(keys)
        set_ = [key for key in keys if self._values.get(key) is not None]
        named = {key: checked(key, self._resolved(key), typed=self._typed(key)) for key in set_}
        values = list(named.values())
        if any(value != values[0] for value in values[1:]):
            said = ", ".join(f"{key} = {value!r}" for key, value in named.items())
            raise ConfigError(f"{said}: these mean one thing here; make them equal")
        return values[0] if values else None

    def whole(self, *keys: str) -> int | None:
        """The same of keys whose values are whole numbers."""
        value: int | None = self.get(*keys)
        return value

    def count(self, *keys: str, default: int) -> int:
        """The same; `default` where none is set."""
        value = self.whole(*keys)
        return default if value is None else value

    def number(self, key: str) -> float | None:
        """The same of one key whose value is a number."""
        value: float | None = self.get(key)
        return value

    def take_where_true(self, *keys: str) -> None:
        """Ask for what is done anyway; a key that says otherwise stays one that nobody asks for."""
        self._asked.update(key for key in keys if self._values.get(key) is True)

    def _typed(self, key: str) -> str:
        """The key at which the value stands that this one refers to."""
        for _ in range(_MAX_DEPTH):
            alone = _REFERENCE.fullmatch(str(self._values[key]))
            if alone is None or alone[1] not in self._values:
                break
            key = alone[1]
        return key

    def _resolved(self, key: str) -> Any:
        return _looked_up(self._values[key], self._config, key, 0)


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _looked_up(value: Any, config: Mapping[str, Any], key: str, depth: int) -> Any:
    """The value with what it refers to in place of each `${...}`."""
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth == _MAX_DEPTH:
        raise ConfigError(f"{key} = '{value}' refers to itself")
    alone = _REFERENCE.fullmatch(value)
    if alone:
        return _looked_up(_referent(alone[1], config, key), config, key, depth + 1)
    text = _REFERENCE.sub(lambda found: str(_referent(found[1], config, key)), value)
    return _looked_up(text, config, key, depth + 1)


def _referent(reference: str, config: Mapping[str, Any], key: str) -> Any:
    if reference.startswith(_VARIABLE):
        name, has_default, default = reference.removeprefix(_VARIABLE).partition(",")
        found = os.environ.get(name.strip(), default.strip() if has_default else None)
        if found is None:
            raise ConfigError(
                f"{key}: the environment variable {name.strip()} is not set; set it, or write "
                f"${{{_VARIABLE}{name.strip()},default}}"
            )
        return found
    node: Any = config
    for part in reference.strip().split("."):
        if not isinstance(node, Mapping) or part not in node:
            raise ConfigError(f"{key}: '${{{reference}}}' refers to a key that is not there")
        node = node[part]
    return node
