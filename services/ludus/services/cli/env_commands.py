"""`ludus env`: the commands for environments. The longer ones are in separate modules."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home
from ludus.services.cli.console import get_stderr, get_stdout, print_line
from ludus.services.cli.env_check import check
from ludus.services.cli.env_list import list_environments
from ludus.services.cli.env_play import play
from ludus.services.cli.env_record import record
from ludus.services.cli.env_replay import replay
from ludus.services.cli.env_serve import serve
from ludus.services.cli.env_show import show_environment
from ludus.services.cli.env_targets import serve_target
from ludus.services.cli.options import TARGET_HELP, Options, TokenEnv, parse_options
from ludus.services.cli.tables import make_bench_notes, make_bench_table

if TYPE_CHECKING:
    from ludus.env.evaluation import EpisodeOutcome
    from ludus.services.cli.bench import BenchPlan, BenchResult

app = typer.Typer(help="Write, serve, check and play environments.", no_args_is_help=True)
app.command("list")(list_environments)
app.command("show")(show_environment)
for command in (serve, check, play, record, replay):
    app.command()(command)


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name in lower case, for example grid_maze.")],
    output_dir: Annotated[
        Path, typer.Option(help="Folder to create the package in.", callback=expand_home)
    ] = Path(),
    has_tools: Annotated[
        bool,
        typer.Option("--tools", help="Give it two tools, one of which ends the episode and pays."),
    ] = False,
) -> None:
    """Create an environment package, NAME_env, that can be played, served and trained on.

    Example: `ludus env init grid_maze`

    Example: `ludus env init shop --tools`
    """
    from ludus.env.targets.scaffolding import write_environment

    paths = write_environment(name, output_dir, has_tools=has_tools)
    folder = min((path.parent for path in paths), key=lambda path: len(path.parts))
    package = folder.name
    next_commands = (
        f"pip install -e {folder}",
        f"ludus env check {package}",
        f"ludus env play {package}",
        f"ludus env bench {package}",
        f"ludus train {folder / 'train.toml'}",
        f"ludus env serve {package} --port 8000",
    )
    for line in (*paths, "", *next_commands):
        print_line(get_stdout(), str(line))


@app.command()
def bench(
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help=f"{TARGET_HELP}.", show_default=False)
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Running server to play on, for example grpc://127.0.0.1:18000. "
            "Default: start one."
        ),
    ] = None,
    options: Options = None,
    num_episodes: Annotated[
        int, typer.Option("--episodes", "--games", min=1, help="Number of episodes per policy.")
    ] = 10_000,
    policy_names: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help="Policy to play. Repeatable. Default: all."),
    ] = None,
    policies_function: Annotated[
        str,
        typer.Option(
            "--policies",
            metavar="MODULE:FUNCTION",
            help="Function that returns the policies: (options) -> {name: policy}. "
            "Default: `fixed_policies` of the package.",
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode.")] = 0,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
) -> None:
    """Compare an environment's fixed policies on the same seeds.

    Prints shares of successes and returns with 95% intervals, exact returns if the package provides
    them, and steps per second. An environment without fixed policies is played at random.

    Example: `ludus env bench openspiel_env --option game=blackjack --episodes 10000`

    Example: `ludus env bench my_module:MyEnvironment --policies my_policies:fixed_policies`
    """
    from ludus.services.cli.bench import BenchPlan

    if address is not None and "://" not in address:
        raise ConfigError(
            f"--address must be grpc://host:port or http://host:port, got '{address}'"
        )
    location = address or target
    if location is None:
        raise ConfigError("TARGET or --address is required; `ludus env list` prints the targets")
    seeds = range(seed, seed + num_episodes)
    plan = BenchPlan(target, policy_names or (), seeds, policies_function)
    with serve_target(location, parse_options(options or ())) as server_address:
        results = _run_bench(plan, server_address, os.environ.get(token_env))
    console = get_stdout()
    console.print(make_bench_table(results))
    for note in make_bench_notes(results):
        print_line(console, note)


def _run_bench(plan: BenchPlan, address: str, token: str | None) -> list[BenchResult]:
    from ludus.services.cli.bench import run_benchmark

    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = get_stderr()
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        tasks: dict[str, TaskID] = {}

        def advance_bar(policy_name: str, _outcome: EpisodeOutcome) -> None:
            if policy_name not in tasks:
                tasks[policy_name] = progress.add_task(escape(policy_name), total=len(plan.seeds))
            progress.advance(tasks[policy_name])

        return asyncio.run(run_benchmark(plan, address, token, advance_bar))
