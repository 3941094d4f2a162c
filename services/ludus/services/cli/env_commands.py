"""`ludus env`: every command for environments; the longer ones have files of their own."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated

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
from ludus.services.cli.env_check import check
from ludus.services.cli.env_init import init
from ludus.services.cli.env_places import (
    TARGET_HELP,
    Options,
    TokenEnv,
    require_options_only_for_targets,
    serving,
)
from ludus.services.cli.env_play import play
from ludus.services.cli.env_replay import replay
from ludus.services.cli.env_serve import serve
from ludus.services.cli.options import parse_options
from ludus.services.cli.tables import bench_table, new_table

if TYPE_CHECKING:
    from ludus.env.evaluation import EpisodeOutcome
    from ludus.services.cli.bench import BenchPlan, BenchResult

app = typer.Typer(help="Write, serve, check and play environments.", no_args_is_help=True)
for command in (init, serve, check, play, replay):
    app.command()(command)


@app.command("list")
def list_packages() -> None:
    """List the environment packages that are installed.

    Example: `ludus env list`
    """
    from ludus.env.targets.targets import installed_packages

    table = new_table()
    for column in ("package", "version", "what it is"):
        table.add_column(column)
    packages = installed_packages()
    for package in packages:
        table.add_row(Text(package.name), Text(package.version), Text(package.summary))
    console = results_console()
    if packages:
        console.print(table)
    else:
        say(console, "none is installed; for example: pip install envs/openspiel_env")
    say(console, "also: gymnasium:<id>, openenv:module:Class, module:Class", "dim")


@app.command()
def bench(
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help=f"{TARGET_HELP}.", show_default=False),
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
    policies: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="What makes the policies, (options) -> {name: policy}; else the package's own.",
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first game.")] = 0,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
) -> None:
    """Play an environment's fixed policies on the same deals.

    Starts a server of its own unless --address names one. Shows win rates and returns with
    95% intervals, exact returns where they are known, and steps per second. Environments
    without fixed policies are played at random.

    Example: `ludus env bench openspiel_env --option game=blackjack --games 10000`

    Example: `ludus env bench my_module:MyEnvironment --policies my_policies:fixed_policies`
    """
    chosen = parse_options(options or ())
    if address is not None:
        if "://" not in address:
            raise ConfigError(
                f"--address expected grpc://host:port or http://host:port, got '{address}'"
            )
        require_options_only_for_targets(address, chosen)
    place = address or target
    if place is None:
        raise ConfigError("expected TARGET or --address, got neither; see `ludus env list`")
    from ludus.services.cli.bench import BenchPlan

    plan = BenchPlan(target, policy or (), range(seed, seed + games), policies)
    with serving(place, chosen) as server:
        results = _play(plan, server, os.environ.get(token_env))
    console = results_console()
    console.print(bench_table(results))
    num_void = sum(result.num_void for result in results)
    if num_void:
        say(console, f"{num_void:,} games were lost with the server and are not counted")


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
