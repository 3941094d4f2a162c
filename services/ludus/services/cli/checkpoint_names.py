"""The checkpoints of a run by name: a step, "latest", or "best".

"best" is the checkpoint with the best evaluation (`ludus.proto.evaluation_history`). A fine-tuning
run that keeps its best model has a separate folder with that model instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.evaluation_history import StepScore, read_evaluation_history
from ludus.proto.runs import CHECKPOINTS_FOLDER, CONFIG_FILE

if TYPE_CHECKING:
    from ludus.proto.config import RecordedRun

LATEST, BEST = "latest", "best"
MODEL_FOLDER = "model"
"""Folder of the model in a checkpoint, and of the kept model in a fine-tuning run."""
_CHECKPOINT_PREFIX = "step-"
_MIN_EVALUATIONS = 2
"""Number of evaluations that can be compared: a run without evaluations during training has only
that after its last step."""


def is_checkpoint_name(text: str) -> bool:
    """Return whether a text has the form of a checkpoint's name. The checkpoint may not exist."""
    return text in (LATEST, BEST) or text.isdecimal()


def find_checkpoint(folder: Path, name: str) -> Path | None:
    """Return the checkpoint of a run with this name.

    None for the best model of a fine-tuning run that keeps this model.

    Raises:
        NotFoundError: there is no such checkpoint.
    """
    checkpoints = {parse_step(path): path for path in list_checkpoints(folder)}
    if name == BEST and _keeps_best_model(folder):
        return None
    if name == BEST and checkpoints:
        return _find_best(folder, checkpoints)
    step = max(checkpoints, default=0) if name == LATEST else int(name) if name.isdecimal() else 0
    if step in checkpoints:
        return checkpoints[step]
    raise NotFoundError(f"run '{folder}' has no checkpoint '{name}'; {_list_names(checkpoints)}")


def find_best_score(folder: Path) -> StepScore | None:
    """Return the score of a run's best checkpoint.

    None if no checkpoint was evaluated, or if there is no other evaluation to compare with.
    """
    return _compute_best_score(folder, map(parse_step, list_checkpoints(folder)))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, the latest last."""
    paths = (folder / CHECKPOINTS_FOLDER).glob(f"{_CHECKPOINT_PREFIX}*")
    checkpoints = [path for path in paths if path.name.removeprefix(_CHECKPOINT_PREFIX).isdecimal()]
    return sorted(checkpoints, key=parse_step)


def parse_step(checkpoint: Path) -> int:
    """Return the step of a checkpoint."""
    return int(checkpoint.name.removeprefix(_CHECKPOINT_PREFIX))


def find_kept_model(folder: Path) -> Path | None:
    """Return the folder of the model that a fine-tuning run keeps; None if there is none."""
    model = folder / MODEL_FOLDER
    return model if model.is_dir() and _is_fine_tuning(folder) else None


def _find_best(folder: Path, checkpoints: Mapping[int, Path]) -> Path:
    best_score = _compute_best_score(folder, checkpoints)
    if best_score is not None:
        return checkpoints[best_score.step]
    config, reason = _read_config(folder), "none of its checkpoints was evaluated"
    if config is not None and not _is_evaluated(config):
        setting = "validation.size" if config.kind == "sft" else "eval.num_games_during"
        reason = f"its model is not evaluated during training ({setting} = 0; raise it)"
    raise NotFoundError(
        f"run '{folder}' has no best checkpoint, because {reason}; {_list_names(checkpoints)}"
    )


def _compute_best_score(folder: Path, steps: Iterable[int]) -> StepScore | None:
    history = read_evaluation_history(folder)
    return history.find_best(steps) if history.num_evaluations >= _MIN_EVALUATIONS else None


def _keeps_best_model(folder: Path) -> bool:
    """Return whether the folder of a fine-tuning run contains the model with the lowest loss."""
    if find_kept_model(folder) is None:
        return False
    config = _read_config(folder)
    if config is None or config.kind != "sft":
        return False
    return config.validation.is_enabled and config.validation.keep == "best"


def _is_evaluated(config: RecordedRun) -> bool:
    """Return whether a run is evaluated during its training."""
    return (
        config.validation.is_enabled if config.kind == "sft" else bool(config.eval.num_games_during)
    )


def _list_names(checkpoints: Iterable[int]) -> str:
    steps = ", ".join(map(str, sorted(checkpoints)))
    if not steps:
        return "no checkpoint was written yet; wait for the first one, or resume the run"
    return f"it has {steps}, and '{LATEST}'"


def _is_fine_tuning(folder: Path) -> bool:
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("kind") == "sft"


def _read_config(folder: Path) -> RecordedRun | None:
    from ludus.proto.config import validate_recorded_run_json

    with suppress(OSError, ValueError, ConfigError):
        return validate_recorded_run_json((folder / CONFIG_FILE).read_bytes())
    return None
