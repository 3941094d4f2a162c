"""The saved notebooks of the Gymformer examples."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

GYMFORMER_FOLDER = Path(__file__).parents[2] / "examples" / "gymformer"
NOTEBOOKS = sorted(GYMFORMER_FOLDER.glob("*.ipynb"))


def test_every_gymformer_notebook_is_present() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["classic", "cot", "reward_model", "rlhf"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_outputs_and_no_errors(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    text = "".join(output.get("text", "") for output in outputs)
    assert "/tmp" not in text and "Warning" not in text
