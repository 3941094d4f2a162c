"""Tables of policies for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ludus.proto.runs import EvalReport, Evaluation, PolicyResult, Summary
from ludus.services.cli.console import new_table
from ludus.services.numbers import NO_VALUE, format_fixed, format_percent, format_percent_interval
from ludus.services.results import (
    NamedResult,
    compare_policies,
    format_policy_name,
    rank_policies,
)

if TYPE_CHECKING:
    from ludus.services.cli.bench import BenchResult

_RESULT_COLUMNS = ("episodes", "wins", "±95%", "draws", "return", "±95%")


def policy_table(results: Sequence[NamedResult], title: str) -> Table:
    """Build a table with one row per policy and half-widths of 95 % intervals."""
    table = new_table("policy", *_RESULT_COLUMNS, numbers=_RESULT_COLUMNS, title=title)
    for named_result in results:
        style = "bold cyan" if named_result.is_trained else None
        table.add_row(Text(named_result.name), *result_cells(named_result.result), style=style)
    return table


def bench_table(results: Sequence[BenchResult]) -> Table:
    """Build a table with one row per fixed policy, with exact returns if they are known."""
    columns = (*_RESULT_COLUMNS, "exact", "steps/s")
    table = new_table("policy", *columns, numbers=columns)
    for bench in results:
        exact = NO_VALUE if bench.exact_return is None else format_fixed(bench.exact_return, 4)
        name, speed = format_policy_name(bench.name), f"{bench.steps_per_second:,.0f}"
        table.add_row(Text(name), *result_cells(bench.result), exact, speed)
    return table


def result_cells(result: PolicyResult) -> list[str]:
    """Format the number of episodes, wins, draws and return of a policy.

    A dash stands for wins and draws that the environment does not report.
    """
    return [
        f"{result.num_games:,}",
        format_percent(result.win_rate),
        format_percent(_half_width(result.win_rate_ci95) if result.win_rate_ci95 else None),
        format_percent(result.draw_rate),
        format_fixed(result.expected_return, 3),
        format_fixed(_half_width(result.expected_return_ci95), 3),
    ]


def summary_tables(summary: Summary) -> Iterator[RenderableType]:
    """Yield per environment the policies before and after training, the baselines and the gap."""
    for name, result in summary.results.items():
        title = f"{summary.name}, {name}" if len(summary.results) > 1 else summary.name
        yield policy_table(compare_policies(result), title)
        yield from _gap(result.report)


def eval_tables(evaluation: Evaluation) -> Iterator[RenderableType]:
    """Yield per environment the evaluated policy, the baselines and the gap."""
    for name, report in evaluation.environments.items():
        prefix = f"{name}, " if len(evaluation.environments) > 1 else ""
        policy = NamedResult("policy", report.policy, is_trained=True)
        results = [policy, *rank_policies(report.baselines)]
        yield policy_table(results, f"{prefix}at temperature {report.temperature:g}")
        yield from _gap(report)


def _gap(report: EvalReport) -> Iterator[RenderableType]:
    if report.gap_closed is None:
        return
    interval = report.gap_closed_ci95
    spread = f" ({format_percent_interval(interval)}, 95%)" if interval is not None else ""
    yield Text(f"gap closed  {format_percent(report.gap_closed)}{spread}", style="bold")


def _half_width(interval: tuple[float, float]) -> float:
    return (interval[1] - interval[0]) / 2
