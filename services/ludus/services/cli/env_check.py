"""`ludus env check`: checks the rules of environments and servers.

TARGET  --> rules of the environment, in a child process --> rules of the wire, on a server
ADDRESS ---------------------------------------------------> rules of the wire

The environment's code never runs in this process, so that the check always finishes.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ludus.proto.errors import UnavailableError, UserError
from ludus.services.cli.console import EXIT_FAILED, get_stderr, get_stdout, make_table, write_json
from ludus.services.cli.env_targets import require_options_only_for_targets
from ludus.services.cli.options import Options, TargetOrAddress, TokenEnv, parse_options

if TYPE_CHECKING:
    from ludus.env.check import CheckReport

_MAX_DETAIL_CHARS = 400
_VERDICT_STYLES = {"ok": "green", "broken": "bold red", "not offered": "dim", "not tried": "dim"}
_MAX_SESSIONS = 12
"""Session limit of the checked server. It is low, because a rule opens more sessions than that."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """The result of one rule."""

    subject: str
    """Subject of the rule: environment or wire."""
    rule: str
    verdict: str
    detail: str


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """The number of episodes and steps of a check, and its time limits."""

    seeds: range
    num_steps: int
    timeout_s: float
    wait_s: float


def check(
    location: TargetOrAddress,
    options: Options = None,
    num_steps: Annotated[
        int, typer.Option("--steps", min=1, help="Maximum steps per episode.")
    ] = 50,
    num_seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Number of episodes per rule.")
    ] = 8,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Time limit per rule in seconds.")
    ] = 60.0,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait",
            min=0.0,
            help="Seconds to wait for ADDRESS to accept a session, for example while its server "
            "starts.",
        ),
    ] = 0.0,
    prints_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
) -> None:
    """Check that an environment or a server fulfills its contract. Exit code 1 if it does not.

    The check briefly opens up to 16 sessions on a server. Optional features that it
    lacks, as OpenEnv's own servers do, are reported as not offered. A rule that exceeds its time
    limit counts as broken. After three such rules, the remaining rules are skipped.

    Example: `ludus env check openspiel_env --option game=tic_tac_toe`

    Example: `ludus env check http://127.0.0.1:8000`

    Example: `ludus env check grpc://gateway:18000/blackjack --wait 120`
    """
    environment_options = parse_options(options or ())
    require_options_only_for_targets(location, environment_options)
    plan = CheckPlan(range(num_seeds), num_steps, timeout_s, wait_s)
    if "://" in location:
        with get_stderr().status(f"checking {location}"):
            report = asyncio.run(_check_address(location, plan, os.environ.get(token_env)))
        rows = _make_rows(report, "wire")
    else:
        rows = _check_target(location, environment_options, plan)
    is_ok = all(row.verdict != "broken" for row in rows)
    if prints_json:
        check_dicts = [
            {"about": row.subject, "rule": row.rule, "verdict": row.verdict, "detail": row.detail}
            for row in rows
        ]
        write_json(json.dumps({"place": location, "ok": is_ok, "checks": check_dicts}, indent=2))
    else:
        get_stdout().print(_make_check_table(rows))
    if not is_ok:
        raise typer.Exit(EXIT_FAILED)


def _check_target(target: str, options: dict[str, Any], plan: CheckPlan) -> list[CheckRow]:
    from ludus.env.check import check_environment
    from ludus.env.serving.subprocess import LocalServer
    from ludus.env.targets.targets import TargetFactory

    with get_stderr().status(f"checking {target}"):
        environment_report = check_environment(
            TargetFactory(target, options),
            seeds=plan.seeds,
            num_steps=plan.num_steps,
            timeout_s=plan.timeout_s,
        )
        rows = _make_rows(environment_report, "environment")
        if environment_report.checks[0].verdict == "broken":  # a server could not build it, either
            return rows
        server = LocalServer(
            target, options, _MAX_SESSIONS, extra_arguments=["--no-determinism-check"]
        )
        try:
            address = server.start().grpc
        except (UserError, UnavailableError) as error:
            detail = f"the server does not start: {error}"
            return [*rows, CheckRow("wire", "a_server_of_it_starts", "broken", detail)]
        try:
            wire_report = asyncio.run(_check_address(address, plan, None))
            return [*rows, *_make_rows(wire_report, "wire")]
        finally:
            server.stop()


async def _check_address(address: str, plan: CheckPlan, token: str | None) -> CheckReport:
    from ludus.env.check import check_server
    from ludus.env.serving.loopback import PlayOptions, open_client

    play_options = PlayOptions(token=token, timeout_s=plan.timeout_s, wait_s=plan.wait_s)
    async with open_client(address, play_options) as client:
        return await check_server(
            client, seeds=plan.seeds, num_steps=plan.num_steps, timeout_s=plan.timeout_s
        )


def _make_rows(report: CheckReport, subject: str) -> list[CheckRow]:
    return [CheckRow(subject, check.name, check.verdict, check.detail) for check in report.checks]


def _make_check_table(rows: list[CheckRow]) -> Table:
    table = make_table("about", "rule", "", "detail")
    for row in rows:
        detail = row.detail[:_MAX_DETAIL_CHARS] + "..." * (len(row.detail) > _MAX_DETAIL_CHARS)
        verdict = Text(row.verdict, style=_VERDICT_STYLES[row.verdict])
        table.add_row(row.subject, Text(row.rule), verdict, Text(detail))
    return table
