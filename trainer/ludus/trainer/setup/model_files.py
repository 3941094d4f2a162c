"""The files of a model's folder, which are checked before a run starts. No weights are read."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ludus.proto.errors import NotFoundError
from ludus.trainer.core.model_paths import (
    MODEL_CONFIG_FILE,
    check_model_folder,
    is_folder_path,
)

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_INDEX_FILE = "model.safetensors.index.json"


def find_model(path: str, field: str, hint: str = "") -> str:
    """Return the expanded path of a folder with a model, or a Hugging Face id unchanged.

    Args:
        field: name of the configuration field, for messages.
        hint: end of the message if there is no model.

    Raises:
        UserError: the path is that of a file, or the folder is not complete.
    """
    folder = check_model_folder(path, field, hint)
    if folder is None:
        return path
    weight_problem = find_weight_problem(folder)
    if weight_problem is not None:
        raise NotFoundError(
            f"{field} = '{path}': {weight_problem}; copy the whole folder that "
            "save_pretrained wrote"
        )
    return str(folder) if is_folder_path(path) else path


def find_weight_problem(folder: Path) -> str | None:
    """Return what is wrong with the files of a model's weights, or None."""
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        return f"it has a {MODEL_CONFIG_FILE} and no weights"
    index_file = folder / _INDEX_FILE
    try:
        if index_file.is_file():
            shards = set(json.loads(index_file.read_text("utf-8"))["weight_map"].values())
            missing_shards = sorted(name for name in shards if not (folder / name).is_file())
            if missing_shards:
                return f"{missing_shards[0]}, which {_INDEX_FILE} lists, is missing"
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        return f"{_INDEX_FILE} cannot be read ({error})"
    for path in sorted(folder.glob("*.safetensors")):
        try:
            # Opening a file checks that it has the size that its header says.
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path.name} is incomplete or damaged ({error})"
    return None
