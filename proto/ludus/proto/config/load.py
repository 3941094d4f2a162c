"""Reading a run configuration from TOML, YAML or JSON, with overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ludus.proto.config.language_model import LanguageModelRun
from ludus.proto.config.mistakes import explain_mistake
from ludus.proto.config.presets import apply_preset
from ludus.proto.config.reward_model import RewardModelRun
from ludus.proto.config.run import ANY_RUN, AnyRunConfig, RunConfig, require_policy
from ludus.proto.config.sft import SftRun
from ludus.proto.documents import MAX_DEPTH, DocumentError, check_limits, read_document
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import describe_place, parse_path, suggest_path
from ludus.proto.values import parse_value

JsonObject = dict[str, Any]

_MAX_MISTAKES = 50
"""Maximum number of mistakes in an error message."""


def load_any_run_config(path: Path | None, overrides: Sequence[str] = ()) -> AnyRunConfig:
    """Read the configuration of any kind of run from a file, and apply overrides.

    Args:
        path: .toml, .yaml, .yml or .json file. None uses the defaults.
        overrides: assignments `section.field=value`. The value is read as JSON or TOML if
            possible, otherwise as text.

    Raises:
        NotFoundError: the file does not exist.
        ConfigError: one line per mistake, with the field, the value and the remedy.
    """
    if path is None:
        return _make_run({}, overrides, "the configuration")
    return _make_run(_read_file(parse_path(path)), overrides, str(path))


def load_run_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the configuration of a run of `ludus train`; see `load_any_run_config`."""
    return require_policy(load_any_run_config(path, overrides))


def make_run_config(
    tree: JsonObject, overrides: Sequence[str] = (), *, source: str = "the configuration"
) -> RunConfig:
    """Build the configuration of a run of `ludus train` from a tree of sections and overrides.

    Args:
        source: name of the tree in messages.

    Raises:
        ConfigError: one line per mistake, with the field, the value and the remedy.
    """
    return require_policy(_make_run(tree, overrides, source))


def load_reward_model_config(
    source: Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> RewardModelRun:
    """Read the configuration of a run of `ludus train-reward`, and apply overrides.

    Args:
        source: .toml, .yaml, .yml or .json file, or the fields of the run.
    """
    overrides = ["kind=reward_model", *overrides]
    if isinstance(source, Path):
        run = load_any_run_config(source, overrides)
    else:
        run = _make_run(dict(source), overrides, "the configuration")
    assert isinstance(run, RewardModelRun)
    return run


def load_sft_config(path: Path | None, overrides: Sequence[str] = ()) -> SftRun:
    """Read the configuration of a run of `ludus sft`; see `load_any_run_config`.

    A file without `kind` is such a run.

    Raises:
        ConfigError: the run is of another kind.
    """
    source = "the configuration" if path is None else str(path)
    tree = {} if path is None else _read_file(parse_path(path))
    run = _make_run({"kind": "sft", **tree}, overrides, source)
    if not isinstance(run, SftRun):
        raise ConfigError(
            f"{source} has kind = '{run.kind}', but `ludus sft` needs kind = 'sft'; use "
            "`ludus train`, or `ludus train-reward` for a reward model"
        )
    return run


def _make_run(tree: JsonObject, overrides: Sequence[str], source: str) -> AnyRunConfig:
    apply_overrides(tree, overrides)
    try:
        check_limits(tree)
    except DocumentError as error:
        raise ConfigError(f"{source} cannot be used: {error}") from None
    tree = apply_preset(tree)
    try:
        return ANY_RUN.validate_python(tree)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        lines = [explain_mistake(mistake) for mistake in mistakes[:_MAX_MISTAKES]]
        if len(mistakes) > _MAX_MISTAKES:
            lines.append(f"  ... and {len(mistakes) - _MAX_MISTAKES:,} more mistakes")
        if "environment" in tree:
            # The user did not write the default name of a single environment.
            name = r"^  environments(\.[^.:]+)?"
            lines = [re.sub(name, "  environment", line) for line in lines]
        raise ConfigError(f"{source} is not a valid run:\n" + "\n".join(lines)) from None


def apply_overrides(tree: JsonObject, overrides: Sequence[str]) -> None:
    """Set the value of each override in `tree`.

    A new `kind` of a section removes the section's other fields, which belong to the old kind.
    """
    for override in overrides:
        keys, value = parse_override(override)
        node = tree
        for depth, key in enumerate(keys[:-1], start=1):
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                raise ConfigError(
                    f"--set {override:.200}: {'.'.join(keys[:depth])} is the value {child!r:.200}, "
                    f"not a section; set {'.'.join(keys[:depth])} instead"
                )
            node = child
        is_section_kind = keys[-1] == "kind" and len(keys) > 1
        if is_section_kind and value != node.get("kind", _find_initial_kind(keys[:-1])):
            node.clear()
        node[keys[-1]] = value


def parse_override(override: str) -> tuple[list[str], Any]:
    """Return the keys and the value of an assignment `a.b=value`."""
    name, separator, value_text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(
            f"--set expected section.field=value, got '{override:.200}'; "
            "for example --set training.num_steps=20"
        )
    if len(keys) > MAX_DEPTH:
        raise ConfigError(
            f"--set {name:.40}... names a field of {len(keys):,} levels; at most {MAX_DEPTH} are "
            "possible"
        )
    return keys, parse_value(value_text, f"--set {name}")


def _read_file(path: Path) -> JsonObject:
    try:
        tree = read_document(path)
    except FileNotFoundError:
        raise NotFoundError(
            f"configuration '{path}' does not exist{describe_place(path)}; {suggest_path(path)} "
            "(the folder examples/ has configurations, for example examples/blackjack/tiny.toml)"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error}") from None
    except DocumentError as error:
        raise ConfigError(f"cannot parse '{path}': {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"'{path}' must contain sections with fields, got {type(tree).__name__}; "
            "see examples/blackjack/tiny.toml"
        )
    return tree


def _find_initial_kind(path: Sequence[str]) -> str | None:
    """Return the kind that a section has in a run with default settings."""
    section: Any = LanguageModelRun()
    for key in path:
        section = getattr(section, key, None)
    return getattr(section, "kind", None)
