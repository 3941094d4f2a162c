"""Lists of written files that the learner returns from save and export."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.errors import CheckpointError
from ludus.trainer.core.types import SavedFile
from tests.learner.tiny_policy import make_learner


@pytest.mark.slow
def test_save_and_export_return_every_written_file_with_size(
    model_path: str, tmp_path: Path
) -> None:
    learner = make_learner(model_path)
    saved_files = learner.save(tmp_path / "learner") + learner.export_model(tmp_path / "model")
    written_paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(saved_file.path for saved_file in saved_files) == sorted(written_paths)
    assert all(saved_file == SavedFile.from_path(saved_file.path) for saved_file in saved_files)
    assert any(
        saved_file.path.name == "model.safetensors" and saved_file.num_bytes
        for saved_file in saved_files
    )


@pytest.mark.slow
def test_unwritable_checkpoint_raises_a_clear_error(model_path: str, tmp_path: Path) -> None:
    (tmp_path / "learner").write_text("a file instead of the folder")
    with pytest.raises(CheckpointError, match=r"learner' cannot be written"):
        make_learner(model_path).save(tmp_path / "learner")
