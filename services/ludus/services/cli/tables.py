"""Tables of policies and their results, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ludus.proto.evaluations import ModelEvaluation
from ludus.proto.runs import EvalReport, Evaluation, PolicyResult, Summary
from ludus.proto.wording import Wording, choose_wording
from ludus.services.cli.console import make_table
from ludus.services.display import (
    NamedResult,
    describe_evaluation,
    describe_models,
    describe_played_episodes,
    format_num_episodes,
    format_policy_name,
    list_model_results,
    list_policies,
    rank_policies,
)
from ludus.services.numbers import (
    NO_VALUE,
    format_fixed,
    format_fixed_interval,
    format_percent,
    format_percent_interval,
)

if TYPE_CHECKING:
    from ludus.services.cli.bench import BenchResult


def make_policy_table(results: Sequence[NamedResult], wording: Wording, title: str) -> Table:
    """Make a table with one row per policy; ± columns are half-widths of 95 % intervals."""
    columns = _list_result_columns(wording)
    table = make_table("policy", *columns, number_columns=columns, title=title)
    for named_result in results:
        style = "bold cyan" if named_result.is_trained else None
        cells = format_result_cells(named_result.result, wording)
        table.add_row(Text(named_result.name), *cells, style=style)
    return table


def make_bench_table(results: Sequence[BenchResult]) -> Table:
    """Make a table with one row per fixed policy, and its exact return if that is known."""
    wording = choose_wording(*(bench_result.is_game for bench_result in results))
    columns = (*_list_result_columns(wording), "exact", "steps/s")
    table = make_table("policy", *columns, number_columns=columns)
    for bench_result in results:
        name, exact_return = format_policy_name(bench_result.policy_name), bench_result.exact_return
        exact_text = NO_VALUE if exact_return is None else format_fixed(exact_return, 4)
        speed_text = f"{bench_result.steps_per_second:,.0f}"
        cells = format_result_cells(bench_result.result, wording)
        table.add_row(Text(name), *cells, exact_text, speed_text)
    return table


def make_bench_notes(results: Sequence[BenchResult]) -> Iterator[str]:
    """Yield notes on void episodes and on tasks that were played repeatedly."""
    num_void = sum(result.num_void for result in results)
    if num_void:
        yield f"{num_void:,} episodes are void and not counted"
    num_tasks = max(result.result.num_tasks or 0 for result in results)
    if any(num_tasks < result.result.num_games for result in results):
        yield f"{num_tasks:,} different tasks; the intervals are over tasks"


def format_result_cells(result: PolicyResult, wording: Wording) -> list[str]:
    """Format a policy's number of episodes, successes, draws and return, with intervals.

    A dash means that the environment does not report success. Only games have draws.
    """
    return [
        format_num_episodes(result),
        format_percent(result.win_rate),
        format_percent(_compute_half_width(result.win_rate_ci95) if result.win_rate_ci95 else None),
        *([format_percent(result.draw_rate)] if wording.has_draws else []),
        format_fixed(result.expected_return, 3),
        format_fixed(_compute_half_width(result.expected_return_ci95), 3),
    ]


def make_summary_tables(summary: Summary) -> Iterator[RenderableType]:
    """Yield, per environment, a table of all policies, and the closed gap if it is known."""
    for name, result in summary.results.items():
        title = f"{summary.name}, {name}" if len(summary.results) > 1 else summary.name
        yield make_policy_table(list_policies(result), choose_wording(result.report.is_game), title)
        yield from map(Text, describe_played_episodes(result.report, result.start))
        yield from _format_gap(result.report)


def make_eval_tables(evaluation: Evaluation) -> Iterator[RenderableType]:
    """Yield, per environment, a table of the evaluated policy and the baselines, and the gap."""
    for name, report in evaluation.environments.items():
        prefix = f"{name}, " if len(evaluation.environments) > 1 else ""
        policy = NamedResult("policy", report.policy, is_trained=True)
        results = [policy, *rank_policies(report.baselines)]
        title = f"{prefix}at temperature {report.temperature:g}"
        yield make_policy_table(results, choose_wording(report.is_game), title)
        yield from map(Text, describe_played_episodes(report))
        yield from _format_gap(report)


def make_model_tables(evaluation: ModelEvaluation) -> Iterator[RenderableType]:
    """Yield a table of all models and fixed policies, notes, and the models' differences."""
    wording = choose_wording(evaluation.is_game)
    yield Text(describe_evaluation(evaluation))
    yield make_policy_table(list_model_results(evaluation), wording, "")
    yield from map(Text, describe_models(evaluation))
    if not evaluation.differences:
        return
    number_columns = ("tasks", "return", "95%", wording.success, "95% ")
    table = make_table(
        "difference", *number_columns, number_columns=number_columns, title="paired differences"
    )
    for difference in evaluation.differences:
        table.add_row(
            Text(f"{difference.first} − {difference.second}"),
            f"{difference.num_tasks:,}",
            format_fixed(difference.return_difference, 3),
            format_fixed_interval(difference.return_difference_ci95),
            format_percent(difference.win_rate_difference),
            format_percent_interval(difference.win_rate_difference_ci95),
        )
    yield table


def _format_gap(report: EvalReport) -> Iterator[RenderableType]:
    if report.gap_closed is not None:
        interval = report.gap_closed_ci95
        interval_text = f" ({format_percent_interval(interval)}, 95%)" if interval else ""
        yield Text(f"gap closed  {format_percent(report.gap_closed)}{interval_text}", style="bold")


def _list_result_columns(wording: Wording) -> Sequence[str]:
    draws = ("draws",) if wording.has_draws else ()
    return "episodes", wording.success, "±95%", *draws, "return", "±95%"


def _compute_half_width(interval: tuple[float, float]) -> float:
    return (interval[1] - interval[0]) / 2
