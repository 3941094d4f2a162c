"""Python code in a model's folder is never run, even if the terminal would say yes."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ludus.proto.errors import NotFoundError
from ludus.trainer.models.load import (
    load_config,
    load_language_model,
    load_sequence_classifier,
    load_skeleton,
    load_tokenizer,
)


@pytest.fixture
def folder(model_path: str, tmp_path: Path) -> Path:
    """Folder of a model whose classes are in the folder; importing them creates the file `ran`."""
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    auto_map = {name: "own.Own" for name in names}
    settings = {"model_type": "own", "architectures": ["Own"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(settings))
    tokenizer_settings = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_settings))
    return folder


@pytest.mark.parametrize(
    "load",
    [
        load_config,
        load_language_model,
        load_skeleton,
        load_tokenizer,
        lambda path: load_sequence_classifier(path, torch.float32, allows_new_head=True),
    ],
)
def test_code_of_a_model_does_not_run(
    folder: Path, load: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    with pytest.raises(NotFoundError, match="the model cannot be loaded"):
        load(folder)
    assert not (folder.parent / "ran").exists()
