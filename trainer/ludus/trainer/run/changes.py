"""What a run that continues does otherwise than the configuration in its folder says."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ludus.proto.config import RunConfig, validate_run_json
from ludus.proto.config.changes import Change, changes_between
from ludus.proto.errors import ConfigError
from ludus.proto.runs import CONFIG_FILE


def changes_since(folder: Path, run: RunConfig) -> list[Change]:
    """What differs from the configuration in the run's folder, and is worth a word.

    Raises:
        ConfigError: it is what a run cannot change, or there is no telling.
    """
    try:
        begun = validate_run_json((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"'{folder / CONFIG_FILE}' expected the configuration that the run was begun with, and "
            f"cannot be read: {error}; put it back, or begin another run"
        ) from None
    return changes_between(begun, run)
