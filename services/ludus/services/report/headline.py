"""The texts of the report: description of the run, notices, key figures and facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ludus.proto.config import NetworkRun, RunConfig
from ludus.proto.metrics import EvalMetric
from ludus.proto.runs import NETWORK, EnvironmentResult, MetricsRow, Summary
from ludus.proto.wording import Wording, choose_wording
from ludus.services.display import describe_environment, format_policy_name
from ludus.services.numbers import (
    format_compact,
    format_duration,
    format_fixed,
    format_fixed_interval,
    format_percent,
    format_percent_interval,
)
from ludus.services.report.run_files import RunFiles


@dataclass(frozen=True, slots=True)
class Tile:
    """A key figure with a title and notes."""

    title: str
    figure: str
    notes: Sequence[str] = ()
    is_main: bool = False


def describe_run(run: RunFiles, config: RunConfig | None) -> str:
    """Return a one-line description of a run that trains a policy."""
    if config is None:
        return run.summary.environment if run.summary is not None else str(run.run_dir)
    environments = " and ".join(map(describe_environment, config.environments.values()))
    num_steps = config.training.num_steps
    if isinstance(config, NetworkRun):
        return (
            f"{environments} · network, classic PPO · at most {num_steps} steps · "
            f"{config.ppo.num_environments} parallel environments · seed {config.seed}"
        )
    # The engine is not always the configured one: transformers replaces vLLM if that is not
    # installed.
    generator = run.summary.generator if run.summary is not None else config.generator.kind
    return f"{environments} · {num_steps} steps · {generator} engine · seed {config.seed}"


def describe_result(run: RunFiles, environment: str) -> str:
    """Return the run's name with its result in an environment, if there is a result yet."""
    if run.summary is None:
        return run.name
    policy = run.summary.results[environment].report.policy
    if policy.win_rate is None:
        return f"{run.name}, return {format_fixed(policy.expected_return, 3)}"
    success = choose_wording(run.is_game(environment)).success
    return f"{run.name}, {format_percent(policy.win_rate)} {success}"


def list_notices(run: RunFiles) -> list[str]:
    """Return notices about missing files or an unfinished run."""
    notices = list(run.notices)
    total_text = "" if run.config is None else f" of {run.config.training.num_steps}"
    progress_text = f"step {run.num_steps_done}{total_text}"
    if run.summary is None and run.sft_summary is None:
        notices.insert(0, f"The run is not finished: {progress_text}.")
    elif run.summary is not None and not run.summary.finished:
        notices.insert(0, f"The run was stopped before its last step: {progress_text}.")
    if not run.metrics:
        notices.append("No metrics were recorded, so there are no curves.")
    return notices


def make_environment_tiles(run: RunFiles) -> dict[str, list[Tile]]:
    """Return the key figures of each environment with evaluations."""
    if run.summary is not None:
        results = run.summary.results
        return {name: _make_result_tiles(run, name, result) for name, result in results.items()}
    rows_by_environment = {name: run.select_rows("eval", name) for name in run.environments}
    return {
        name: _make_latest_tiles(eval_rows[-1], choose_wording(run.is_game(name)))
        for name, eval_rows in rows_by_environment.items()
        if eval_rows
    }


def make_run_tiles(run: RunFiles) -> list[Tile]:
    """Return the key figures of the whole run; none before the first metrics."""
    summary = run.summary
    if summary is not None:
        void_text = f"{summary.episodes_lost:,} lost"
        if summary.episodes_failed:
            void_text += f", {summary.episodes_failed:,} failed"
        episode_notes = f"{summary.games_played:,} played", void_text
        total_text = f"{format_duration(summary.wall_seconds_total)} in total"
        time_notes = total_text, _describe_processes(summary)
        return [
            Tile("Episodes trained", f"{summary.games_trained:,}", episode_notes),
            Tile("Training time", format_duration(summary.wall_seconds_training), time_notes),
        ]
    if not run.metrics:
        return []
    num_games = max(row.num_games_trained for row in run.metrics)
    return [
        Tile("Episodes trained", f"{num_games:,}"),
        Tile("Training time", format_duration(run.metrics[-1].elapsed_s)),
    ]


def list_run_facts(summary: Summary) -> list[tuple[str, str]]:
    """Return the names and values of the summary's counters."""
    return [
        ("Engine", summary.generator),
        ("Rollout workers", str(summary.num_rollout_workers)),
        ("Learner ranks", str(summary.num_learner_ranks)),
        ("Weight syncs", f"{summary.weight_syncs:,}"),
        ("Canary failures", f"{summary.canary_failures:,}"),
        ("Largest canary error", f"{format_compact(summary.canary_max_error)} nats"),
        ("Largest staleness in versions", str(summary.max_staleness_seen)),
        ("Environment restarts", f"{summary.environment_restarts:,}"),
        ("Learner restarts", f"{summary.learner_restarts:,}"),
        ("Groups lost with a learner", f"{summary.groups_rolled_back:,}"),
        ("Invalid answers", format_percent(summary.invalid_rate, 2)),
        ("Episodes lost", f"{summary.episodes_lost:,}"),
        ("Episodes failed", f"{summary.episodes_failed:,}"),
        *(("Environment", result.environment) for result in summary.results.values()),
    ]


def _make_result_tiles(run: RunFiles, environment: str, result: EnvironmentResult) -> list[Tile]:
    start, report, policy = result.start, result.report, result.report.policy
    success_notes = [f"{format_percent_interval(policy.win_rate_ci95)} (95%)"]
    return_notes = [f"{format_fixed_interval(policy.expected_return_ci95)} (95%)"]
    if start is not None:
        success_notes.append(f"{format_percent(start.win_rate)} before training")
        return_notes.append(f"{format_fixed(start.expected_return, 3)} before training")
    reports_success = policy.win_rate is not None
    return_text = format_fixed(policy.expected_return, 3)
    tiles = [Tile("Expected return", return_text, return_notes, is_main=not reports_success)]
    if reports_success:
        title = choose_wording(report.is_game).success_rate.capitalize()
        rate_text = format_percent(policy.win_rate)
        tiles.insert(0, Tile(title, rate_text, success_notes, is_main=True))
    if report.gap_closed is not None:
        config = run.find_environment_config(environment)
        random_name = format_policy_name((config.random_policy if config else "") or "random")
        gap_notes = [f"from {random_name} to {run.find_reference_name(environment)}"]
        if report.gap_closed_ci95:
            gap_notes.insert(0, f"{format_percent_interval(report.gap_closed_ci95)} (95%)")
        tiles.append(Tile("Gap closed", format_percent(report.gap_closed), gap_notes))
    return tiles


def _make_latest_tiles(row: MetricsRow, wording: Wording) -> list[Tile]:
    values = row.values
    figures: dict[str, tuple[EvalMetric, Callable[[float], str]]] = {
        wording.success_rate.capitalize(): (EvalMetric.WIN_RATE, format_percent),
        "Expected return": (EvalMetric.RETURN_MEAN, lambda mean: format_fixed(mean, 3)),
        "Gap closed": (EvalMetric.GAP_CLOSED, format_percent),
    }
    tiles: list[Tile] = []
    for title, (metric, format_value) in figures.items():
        if metric in values:
            notes = () if tiles else (f"at step {row.step}, the latest evaluation",)
            tiles.append(Tile(title, format_value(values[metric]), notes, not tiles))
    return tiles


def _describe_processes(summary: Summary) -> str:
    if summary.generator == NETWORK:
        return "in one process"
    num_workers, num_ranks = summary.num_rollout_workers, summary.num_learner_ranks
    return (
        f"{num_workers} rollout worker{'s'[: num_workers > 1]},"
        f" {num_ranks} learner rank{'s'[: num_ranks > 1]}"
    )
