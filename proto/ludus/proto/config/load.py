"""Reading a run configuration from TOML, YAML or JSON, with overrides."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ludus.proto.config.presets import with_preset
from ludus.proto.config.reward_model import RewardModelConfig
from ludus.proto.config.run import RunConfig
from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean
from ludus.proto.values import parse_value

JsonObject = dict[str, Any]


def load_run_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The run configuration of a file, after `a.b=value` overrides, over its preset.

    Args:
        path: .toml, .yaml, .yml or .json; None starts from the defaults.
        overrides: each `section.field=value`; the value is read as JSON or TOML, else as text.

    Raises:
        NotFoundError: the file is not there.
        ConfigError: one line per mistake, each with field, value and way out.
    """
    tree = _read_file(path) if path else {}
    return run_config_from(tree, overrides, source=str(path) if path else "the configuration")


def run_config_from(
    tree: JsonObject, overrides: Sequence[str] = (), *, source: str = "the configuration"
) -> RunConfig:
    """The run configuration of a tree of sections, after `a.b=value` overrides, over its preset.

    Args:
        source: what a message calls it.

    Raises:
        ConfigError: one line per mistake, each with field, value and way out.
    """
    apply_overrides(tree, overrides)
    tree = with_preset(tree)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors()]
        if "environment" in tree:
            # It was written alone; its name is not the user's.
            lines = [re.sub(r"^  environments\.[^.:]+", "  environment", line) for line in lines]
        raise ConfigError(f"{source} is not a valid run:\n" + "\n".join(lines)) from None


def load_reward_model_config(
    source: Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> RewardModelConfig:
    """How a reward model is trained, after `field=value` overrides.

    Args:
        source: a file, .toml, .yaml, .yml or .json, or the fields themselves.

    Raises:
        NotFoundError: the file is not there.
        ConfigError: one line per mistake, each with field, value and way out.
    """
    tree = _read_file(source) if isinstance(source, Path) else dict(source)
    apply_overrides(tree, overrides)
    try:
        return RewardModelConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(detail, RewardModelConfig) for detail in error.errors()]
        name = str(source) if isinstance(source, Path) else "this"
        raise ConfigError(
            f"{name} is no valid training of a reward model:\n" + "\n".join(lines)
        ) from None


def apply_overrides(tree: JsonObject, overrides: Sequence[str]) -> None:
    """Set each override's value in `tree`.

    Another `kind` replaces its section: the fields of the old variant do not fit the new one.
    """
    for override in overrides:
        keys, value = parse_override(override)
        node = tree
        for depth, key in enumerate(keys[:-1], start=1):
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                raise ConfigError(
                    f"--set {override}: {'.'.join(keys[:depth])} is the value {child!r}, "
                    "not a section; set it as a whole"
                )
            node = child
        if keys[-1] == "kind" and value != node.get("kind", _default_kind(keys[:-1])):
            node.clear()
        node[keys[-1]] = value


def parse_override(text: str) -> tuple[list[str], Any]:
    """The keys and the value of one `a.b=value`."""
    name, separator, raw = text.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(
            f"--set expected section.field=value, got '{text}'; "
            "for example --set training.num_steps=20"
        )
    return keys, parse_value(raw, f"--set {name}")


def _read_file(path: Path) -> JsonObject:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError(
            f"no configuration at '{path}'; examples stand in examples/, "
            "for example examples/blackjack/tiny.toml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from None
    try:
        tree = _parse(path.suffix.lower(), text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be parsed: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"'{path}' expected sections with fields, got {type(tree).__name__}; "
            "see examples/blackjack/tiny.toml"
        )
    return tree


def _parse(suffix: str, text: str) -> Any:
    match suffix:
        case ".toml":
            return tomllib.loads(text)
        case ".yaml" | ".yml":
            return yaml.safe_load(text) or {}
        case ".json":
            return json.loads(text)
        case _:
            raise ConfigError(f"expected a .toml, .yaml or .json file, got '{suffix}'")


def _explain(detail: ErrorDetails, root: type[BaseModel] = RunConfig) -> str:
    location = [str(part) for part in detail["loc"]]
    path, sections = _follow(location, root)
    value = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return f"  {path}: unknown key{_closest(location[-1], sections)}"
        case "missing":
            return f"  {path}: required, but not set"
        case "value_error":
            where = f"{path}: " if path else ""
            return f"  {where}{detail['msg'].removeprefix('Value error, ')}"
        case "union_tag_invalid":
            expected = (detail.get("ctx") or {}).get("expected_tags", "")
            return f"  {path}.kind: expected one of {expected}, got {value.get('kind')!r}"
        case _:
            return f"  {path}: {detail['msg'][0].lower()}{detail['msg'][1:]}, got {value!r}"


def _follow(location: Sequence[str], root: type[BaseModel]) -> tuple[str, list[type[BaseModel]]]:
    """The field's name as people write it, and the sections that could hold its last part.

    pydantic puts the chosen variant of a union into the location; people do not.
    """
    names: list[str] = []
    sections: list[type[BaseModel]] = [root]
    for depth, part in enumerate(location):
        chosen = [section for section in sections if _kind(section) == part]
        if chosen and not any(part in section.model_fields for section in sections):
            sections = chosen
            continue
        names.append(part)
        if not any(part in section.model_fields for section in sections):
            continue  # a name or a number within a field that holds many sections
        if depth < len(location) - 1:
            fields = [s.model_fields[part] for s in sections if part in s.model_fields]
            sections = [model for field in fields for model in models_in(field.annotation)]
    return ".".join(names), sections


def _default_kind(path: Sequence[str]) -> str | None:
    """The variant that a section is when its `kind` is not set."""
    section: Any = RunConfig()
    for key in path:
        section = getattr(section, key, None)
    return getattr(section, "kind", None)


def _closest(key: str, sections: Sequence[type[BaseModel]]) -> str:
    known = sorted({name for section in sections for name in section.model_fields})
    return f"; {did_you_mean(key, known) or 'known keys: ' + ', '.join(known)}"


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The configuration sections that a field of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def _kind(section: type[BaseModel]) -> str | None:
    field = section.model_fields.get("kind")
    return None if field is None else str(field.default)
