"""Paths of models in a configuration, and their checks. They need no torch."""

from __future__ import annotations

from pathlib import Path

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import describe_place, parse_path, suggest_path
from ludus.proto.runs import CHECKPOINTS_FOLDER, METRICS_FILE

MODEL_CONFIG_FILE = "config.json"
FINE_TUNED_FOLDER = "model"
"""Folder of the model in the folder of a fine-tuning run."""
_GGUF_SUFFIX = ".gguf"


def is_folder_path(path: str) -> bool:
    """Return whether a model's path has the form of a folder, not of a Hugging Face id."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def is_fine_tuned_run(folder: Path) -> bool:
    """Return whether a folder is that of a run of `ludus sft` that has written its model."""
    return (folder / METRICS_FILE).is_file() and (
        folder / FINE_TUNED_FOLDER / MODEL_CONFIG_FILE
    ).is_file()


def check_model_folder(path: str, field: str, hint: str = "") -> Path | None:
    """Check that a folder contains a model; return the folder, or None for a Hugging Face id.

    Args:
        field: name of the configuration field, for messages.
        hint: end of the message if there is no model.

    Raises:
        UserError: the path is that of a file, or the folder contains no model.
    """
    folder = parse_path(path)
    gguf_file = find_gguf(folder)
    if gguf_file is not None:
        raise ConfigError(
            f"{field} = '{path}' is a GGUF file, which cannot be trained; convert it with `ludus "
            f"model convert {gguf_file} FOLDER`, and set {field} = './FOLDER'"
        )
    if not folder.exists():
        if not is_folder_path(path):
            return None
        raise NotFoundError(
            f"{field} = '{path}': there is no such folder{describe_place(path)}; "
            + suggest_path(path, f"give a Hugging Face id like 'Qwen/Qwen3-1.7B'{hint}")
        )
    if (folder / CHECKPOINTS_FOLDER).is_dir() and (folder / METRICS_FILE).is_file():
        raise ConfigError(
            f"{field} = '{path}' is the folder of a run; write its model to a folder with `ludus "
            f"export {path} FOLDER`, and set {field} = './FOLDER'"
        )
    if not (folder / MODEL_CONFIG_FILE).is_file():
        problem = "this is a file" if folder.is_file() else "there is no model"
        raise NotFoundError(
            f"{field} = '{path}': {problem}; expected a folder with config.json, or a "
            f"Hugging Face id like 'Qwen/Qwen3-1.7B'{hint}"
        )
    return folder


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path names, or one in a folder without another model."""
    if path.suffix.lower() == _GGUF_SUFFIX:
        return path
    if not path.is_dir() or (path / MODEL_CONFIG_FILE).is_file():
        return None
    return next(path.glob(f"*{_GGUF_SUFFIX}"), None)
