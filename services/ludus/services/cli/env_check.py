"""`ludus env check`: the executable specification, against a target or a running server.

TARGET  --> rules of the environment, in a child process --> rules of the wire, on a server of it
ADDRESS ---------------------------------------------------> rules of the wire

No code of the environment runs in this process, so that the check always comes to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.proto.errors import UnavailableError, UserError
from ludus.services.cli.console import progress_console, results_console
from ludus.services.cli.env_places import (
    Options,
    Place,
    TokenEnv,
    require_options_only_for_targets,
)
from ludus.services.cli.options import parse_options
from ludus.services.cli.tables import CheckRow, check_table

if TYPE_CHECKING:
    from ludus.env.check import CheckReport

CHECK_FAILED = 1
_IN_PROCESS = "environment"
_ON_THE_WIRE = "wire"
_MAX_SESSIONS = 12
"""Of a server that is started here: few enough to see how it refuses more."""


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """How much is played."""

    seeds: range
    num_steps: int
    timeout_s: float
    wait_s: float


def check(
    place: Place,
    options: Options = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of an episode, at most.")] = 50,
    seeds: Annotated[int, typer.Option(min=1, help="Episodes for each rule.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one rule.")] = 60.0,
    wait: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds until an address must open a session; it may have to start a server.",
        ),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
) -> None:
    """Check that an environment or a server keeps its contract; exit code 1 when it does not.

    A server is for a moment filled with up to 16 sessions. What OpenEnv's own servers do not
    have is reported as not offered. A rule that does not end is broken, and after three of them
    the others are not tried.

    Example: `ludus env check openspiel_env --option game=tic_tac_toe`

    Example: `ludus env check http://127.0.0.1:8000`

    Example: `ludus env check grpc://gateway:18000/blackjack --wait 120`
    """
    chosen = parse_options(options or ())
    require_options_only_for_targets(place, chosen)
    plan = CheckPlan(range(seeds), steps, timeout, wait)
    if "://" in place:
        with _status(f"checking {place}"):
            report = _check_address(place, plan, os.environ.get(token_env))
        rows = _rows(report, _ON_THE_WIRE)
    else:
        rows = _check_target(place, chosen, plan)
    is_sound = all(row.verdict != "broken" for row in rows)
    if as_json:
        found = [
            {"about": r.about, "rule": r.rule, "verdict": r.verdict, "detail": r.detail}
            for r in rows
        ]
        typer.echo(json.dumps({"place": place, "ok": is_sound, "checks": found}, indent=2))
    else:
        results_console().print(check_table(rows))
    if not is_sound:
        raise typer.Exit(CHECK_FAILED)


def _check_target(target: str, options: dict[str, Any], plan: CheckPlan) -> list[CheckRow]:
    from ludus.env.check import check_environment
    from ludus.env.serving.subprocess import LocalServer
    from ludus.env.targets.targets import TargetFactory

    with _status(f"checking {target}"):
        in_process = check_environment(
            TargetFactory(target, options),
            seeds=plan.seeds,
            num_steps=plan.num_steps,
            timeout_s=plan.timeout_s,
        )
        rows = _rows(in_process, _IN_PROCESS)
        if not in_process.checks[0].ok:  # no server could build it either
            return rows
        server = LocalServer(
            target, options, _MAX_SESSIONS, extra_arguments=["--no-determinism-check"]
        )
        try:
            address = server.start().grpc
        except (UserError, UnavailableError) as error:
            detail = f"expected a server that listens, got {error}"
            return [*rows, CheckRow(_ON_THE_WIRE, "a_server_of_it_starts", "broken", detail)]
        try:
            return [*rows, *_rows(_check_address(address, plan, None), _ON_THE_WIRE)]
        finally:
            server.stop()


def _check_address(address: str, plan: CheckPlan, token: str | None) -> CheckReport:
    from ludus.env.serving.loopback import PlayOptions

    play_options = PlayOptions(token=token, timeout_s=plan.timeout_s, wait_s=plan.wait_s)
    return asyncio.run(_check_on_wire(address, plan, play_options))


async def _check_on_wire(address: str, plan: CheckPlan, play_options: Any) -> CheckReport:
    from ludus.env.check import check_server
    from ludus.env.serving.loopback import connected

    async with connected(address, play_options) as client:
        return await check_server(
            client, seeds=plan.seeds, num_steps=plan.num_steps, timeout_s=plan.timeout_s
        )


def _rows(report: CheckReport, about: str) -> list[CheckRow]:
    return [CheckRow(about, check.name, check.verdict, check.detail) for check in report.checks]


@contextlib.contextmanager
def _status(message: str) -> Iterator[None]:
    console = progress_console()
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield
