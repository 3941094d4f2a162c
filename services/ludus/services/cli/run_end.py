"""Lines about the results of a finished run: its model, its best checkpoint, and its size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ludus.proto.metrics import EvalMetric
from ludus.services.cli.checkpoint_names import (
    BEST,
    MODEL_FOLDER,
    find_best_score,
    list_checkpoints,
    parse_step,
)
from ludus.services.numbers import format_fixed, format_percent, format_size

_TITLES: dict[str, str] = {
    EvalMetric.GAP_CLOSED: "gap closed",
    EvalMetric.WIN_RATE: "wins",
    EvalMetric.RETURN_MEAN: "return",
}


def list_result_lines(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each line about a run that trained a policy."""
    checkpoints = list_checkpoints(run_dir)
    if checkpoints:
        latest = checkpoints[-1]
        has_model = (latest / MODEL_FOLDER).is_dir()
        yield ("model", str(latest / MODEL_FOLDER)) if has_model else ("checkpoint", str(latest))
        best_score = find_best_score(run_dir)
        if best_score is not None and best_score.step != parse_step(latest):
            is_share = best_score.metric != EvalMetric.RETURN_MEAN
            value = best_score.value
            text = format_percent(value) if is_share else format_fixed(value, 3)
            title = _TITLES[best_score.metric]
            yield BEST, f"step {best_score.step:,}, {title} {text}: {run_dir}@{BEST}"
    yield describe_size(run_dir)


def describe_size(run_dir: Path) -> tuple[str, str]:
    """Return the title and the text of the line with the size of a run."""
    from ludus.services.run_list import measure_folder

    return "folder", f"{run_dir}, {format_size(measure_folder(run_dir))}"
