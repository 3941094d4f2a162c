"""The files of a model's weights, which can be checked without reading the weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ludus.trainer.core.model_paths import MODEL_CONFIG_FILE

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def find_weight_problem(folder: Path) -> str | None:
    """Return what is wrong with the files of a model's weights, or None."""
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        return f"it has a {MODEL_CONFIG_FILE} and no weights"
    index_file = folder / SAFE_WEIGHTS_INDEX_NAME
    try:
        if index_file.is_file():
            shards = set(json.loads(index_file.read_text("utf-8"))["weight_map"].values())
            missing_shards = sorted(name for name in shards if not (folder / name).is_file())
            if missing_shards:
                return f"{missing_shards[0]}, which {index_file.name} lists, is missing"
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        return f"{index_file.name} cannot be read ({error})"
    for path in sorted(folder.glob("*.safetensors")):
        try:
            # Opening a file checks its size against its header.
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path.name} is incomplete or damaged ({error})"
    return None
