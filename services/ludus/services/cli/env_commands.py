"""`ludus env`: serving, checking and benching environments."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ludus.proto.errors import ConfigError
from ludus.services.cli.console import progress_console, results_console, say
from ludus.services.cli.options import parse_options
from ludus.services.cli.tables import bench_table, new_table

if TYPE_CHECKING:
    from ludus.env.evaluation import EpisodeOutcome
    from ludus.services.cli.bench import BenchPlan, BenchResult

app = typer.Typer(help="Serve, check and bench environments.", no_args_is_help=True)

Package = Annotated[
    str,
    typer.Argument(metavar="PACKAGE", help="Environment package, for example openspiel_env."),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="What to build it with; may be repeated."),
]
TokenEnv = Annotated[
    str, typer.Option(help="Environment variable that holds the token; it may be unset.")
]
CHECK_FAILED = 1


@app.command()
def serve(
    package: Package,
    options: Options = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="For HTTP and WebSocket; 0 takes a free one.")
    ] = 8000,
    grpc_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="For gRPC; port + 10000 if not set."),
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions at once.")] = 256,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")
    ] = False,
) -> None:
    """Serve an environment over HTTP, WebSocket and gRPC until Ctrl-C.

    Example: `ludus env serve openspiel_env --option game=blackjack --port 8004`
    """
    from ludus.env.packages import environment_factory
    from ludus.env.server import run_server_cli

    factory = environment_factory(package, parse_options(options or ()))
    # One is built before the ports open: bad options end here, not in the first session.
    factory().close()
    arguments = [f"--host={host}", f"--port={port}", f"--max-sessions={max_sessions}"]
    arguments += [f"--token-env={token_env}", *(["--insecure"] if insecure else [])]
    if grpc_port is not None:
        arguments.append(f"--grpc-port={grpc_port}")
    run_server_cli(factory, argv=arguments)


@app.command("list")
def list_packages() -> None:
    """List the environment packages that are installed.

    Example: `ludus env list`
    """
    table = new_table()
    for column in ("package", "version", "what it is"):
        table.add_column(column)
    from ludus.env.packages import installed_packages

    packages = installed_packages()
    for package in packages:
        table.add_row(Text(package.name), Text(package.version), Text(package.summary))
    console = results_console()
    if packages:
        console.print(table)
    else:
        say(console, "none is installed; for example: pip install envs/openspiel_env")


@app.command()
def check(package: Package, options: Options = None) -> None:
    """Check that an environment keeps its contract; exit code 1 when it does not.

    Example: `ludus env check openspiel_env --option game=tic_tac_toe`
    """
    from ludus.env.check import check_environment
    from ludus.env.packages import environment_factory

    factory = environment_factory(package, parse_options(options or ()))
    factory().close()
    report = check_environment(factory)
    table = new_table()
    for column in ("rule", "", "what was found"):
        table.add_column(column)
    for rule in report.checks:
        verdict = Text("ok", style="green") if rule.ok else Text("broken", style="bold red")
        table.add_row(Text(rule.name), verdict, Text(rule.detail))
    results_console().print(table)
    if not report.ok:
        raise typer.Exit(CHECK_FAILED)


@app.command()
def bench(
    package: Annotated[
        str | None,
        typer.Argument(metavar="PACKAGE", help="For example openspiel_env.", show_default=False),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Play on this running server, for example grpc://127.0.0.1:18000."),
    ] = None,
    options: Options = None,
    games: Annotated[int, typer.Option(min=1, help="Games per policy.")] = 10_000,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Play this policy only; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first game.")] = 0,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
) -> None:
    """Play an environment's fixed policies on the same deals.

    Starts a server of its own unless --address names one. Shows win rates and returns with
    95% intervals, exact returns where they are known, and steps per second.

    Example: `ludus env bench openspiel_env --option game=blackjack --games 10000`
    """
    chosen = parse_options(options or ())
    if address is not None and chosen:
        raise ConfigError(
            "expected --option or --address, got both: the server at the address was built "
            "already; leave one of them out"
        )
    from ludus.services.cli.bench import BenchPlan

    plan = BenchPlan(package, policy or (), range(seed, seed + games))
    with _server(package, chosen, address) as server:
        results = _play(plan, server, os.environ.get(token_env))
    console = results_console()
    console.print(bench_table(results))
    num_void = sum(result.num_void for result in results)
    if num_void:
        say(console, f"{num_void:,} games were lost with the server and are not counted")


@contextlib.contextmanager
def _server(package: str | None, options: dict[str, Any], address: str | None) -> Iterator[str]:
    """The address of the server to play on; one that is started here ends with the context."""
    if address is not None:
        yield address
        return
    if package is None:
        raise ConfigError("expected PACKAGE or --address, got neither; see `ludus env list`")
    from ludus.env.local_server import LocalServer
    from ludus.env.packages import require_package

    require_package(package)

    server = LocalServer(package, options)
    try:
        yield server.start().grpc
    finally:
        server.stop()


def _play(plan: BenchPlan, address: str, token: str | None) -> list[BenchResult]:
    from ludus.services.cli.bench import bench as play

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = progress_console()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, _outcome: EpisodeOutcome) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(escape(name), total=len(plan.seeds))
            progress.advance(tasks[name])

        return asyncio.run(play(plan, address, token, advance))
