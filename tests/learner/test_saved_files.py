"""A rank says which files it has written, so that others can look for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.errors import CheckpointError
from ludus.trainer.core.types import SavedFile
from tests.learner.tiny_policy import make_learner


def test_a_rank_names_every_file_that_it_has_written_with_its_size(
    model_path: str, tmp_path: Path
) -> None:
    learner = make_learner(model_path)
    named = learner.save(tmp_path / "learner") + learner.export_model(tmp_path / "model")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(file.path for file in named) == sorted(written)
    assert all(file == SavedFile.from_path(file.path) for file in named)
    assert any(file.path.name == "model.safetensors" and file.num_bytes for file in named)


def test_a_checkpoint_that_cannot_be_written_is_named(model_path: str, tmp_path: Path) -> None:
    (tmp_path / "learner").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"learner' cannot be written"):
        make_learner(model_path).save(tmp_path / "learner")
