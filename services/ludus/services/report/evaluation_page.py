"""The report page of an evaluation of models."""

from __future__ import annotations

from pathlib import Path

from ludus.proto.evaluations import EvaluatedEpisode, ModelEvaluation
from ludus.proto.wording import choose_wording
from ludus.services import display
from ludus.services.numbers import format_fixed, format_fixed_interval
from ludus.services.report.files import render_template, write_atomically
from ludus.services.report.headline import Tile
from ludus.services.report.page import make_return_scale

NUM_SHOWN_SEEDS = 20
"""Number of first seeds whose completions the page shows."""


def write_evaluation_report(evaluation: ModelEvaluation, path: Path) -> Path:
    """Write the report of an evaluation and return its path.

    Raises:
        ConfigError: the file cannot be written.
    """
    results = display.list_model_results(evaluation)
    page = render_template(
        "evaluation.html",
        evaluation=evaluation,
        lead=display.describe_evaluation(evaluation),
        notes=list(display.describe_models(evaluation)),
        results=results,
        wording=choose_wording(evaluation.is_game),
        scale=make_return_scale(results),
        tiles=_make_tiles(evaluation),
        episodes_by_seed=_group_by_seed(evaluation),
        num_shown_seeds=NUM_SHOWN_SEEDS,
    )
    return write_atomically(path, page, option="--report")


def _make_tiles(evaluation: ModelEvaluation) -> list[Tile]:
    """Return a key figure for each model."""
    tiles = []
    for name, model in evaluation.models.items():
        result = model.result
        return_text = format_fixed(result.expected_return, 3)
        return_note = f"return {return_text} ({format_fixed_interval(result.expected_return_ci95)})"
        if result.win_rate is None:
            figure, notes = return_text, [f"mean {return_note}, 95%"]
        else:
            figure, notes = display.describe_success(result), [return_note]
        tiles.append(Tile(name, figure, notes, is_main=True))
    return tiles


def _group_by_seed(evaluation: ModelEvaluation) -> dict[int, list[EvaluatedEpisode]]:
    """Return the models' episodes of the first seeds."""
    episodes_by_seed: dict[int, list[EvaluatedEpisode]] = {}
    for episode in evaluation.episodes:
        if episode.policy in evaluation.models:
            episodes_by_seed.setdefault(episode.seed, []).append(episode)
    seeds = sorted(episodes_by_seed)[:NUM_SHOWN_SEEDS]
    return {seed: episodes_by_seed[seed] for seed in seeds}
