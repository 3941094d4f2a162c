"""The files of a model's folder, which are checked before a run starts. No weights are read."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import parse_path
from ludus.trainer.models import load

_GGUF_SUFFIX = ".gguf"
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
    folder = parse_path(path)
    gguf_file = find_gguf(folder)
    if gguf_file is not None:
        raise ConfigError(
            f"{field} = '{path}' is a GGUF file, which cannot be trained; convert it with `ludus "
            f"model convert {gguf_file} FOLDER`, and set {field} = './FOLDER'"
        )
    if not load.is_folder_path(path) and not folder.exists():
        return path
    if not (folder / load.MODEL_CONFIG_FILE).is_file():
        problem = "this is a file" if folder.is_file() else "there is no model"
        raise NotFoundError(
            f"{field} = '{path}': {problem}; expected a folder with config.json, or a "
            f"Hugging Face id like 'Qwen/Qwen3-1.7B'{hint}"
        )
    weight_problem = find_weight_problem(folder)
    if weight_problem is not None:
        raise NotFoundError(
            f"{field} = '{path}': {weight_problem}; copy the whole folder that "
            "save_pretrained wrote"
        )
    return str(folder) if load.is_folder_path(path) else path


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path names, or one in a folder without another model."""
    if path.suffix.lower() == _GGUF_SUFFIX:
        return path
    if not path.is_dir() or (path / load.MODEL_CONFIG_FILE).is_file():
        return None
    return next(path.glob(f"*{_GGUF_SUFFIX}"), None)


def find_weight_problem(folder: Path) -> str | None:
    """Return what is wrong with the files of a model's weights, or None."""
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        return f"it has a {load.MODEL_CONFIG_FILE} and no weights"
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
