"""`ludus env replay`: replays recorded episodes and compares each step.

FILE --> episodes --grouped by environment--> a server per environment --> table, first difference
"""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home
from ludus.services.cli.console import EXIT_FAILED, get_stdout, make_table, print_line
from ludus.services.cli.options import Options, TokenEnv, parse_options

if TYPE_CHECKING:
    from ludus.env.recording.format import RecordedEpisode
    from ludus.env.recording.verify import Replay


def replay(
    file: Annotated[
        Path, typer.Argument(help="Recording, or folder with recordings.", callback=expand_home)
    ],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Target to replay on. Default: the one named in the recording.",
            show_default=False,
        ),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Running server (http:// or grpc://) to replay on.")
    ] = None,
    options: Options = None,
    max_episodes: Annotated[
        int | None,
        typer.Option(
            "--limit", min=1, help="Maximum number of episodes to replay.", show_default="all"
        ),
    ] = None,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
) -> None:
    """Replay recorded episodes and compare each step. Exit code 1 if an episode differs.

    Example: `ludus env replay games.jsonl`

    Example: `ludus env replay games.jsonl --address grpc://127.0.0.1:18000 --limit 100`
    """
    from ludus.env.recording.format import read_recording
    from ludus.env.targets.targets import environment_factory

    environment_options = parse_options(options or ())
    if address is not None and (target is not None or environment_options):
        raise ConfigError("--address cannot be combined with TARGET or --option; remove one")
    if environment_options and target is None:
        raise ConfigError("--option needs TARGET; name the target")
    episodes = list(itertools.islice(read_recording(file), max_episodes))
    if not episodes:
        raise ConfigError(f"'{file}' contains no recorded episode")
    server = address or (environment_factory(target, environment_options) if target else None)
    replays = asyncio.run(_replay_episodes(episodes, server, os.environ.get(token_env)))
    _print_replays(replays)
    if not all(replay.is_same for replay in replays):
        raise typer.Exit(EXIT_FAILED)


async def _replay_episodes(
    episodes: list[RecordedEpisode], server: Any, token: str | None
) -> list[Replay]:
    """Replay the episodes in order; consecutive episodes of an environment share a server."""
    from ludus.env.recording.verify import make_recorded_factory, replay_episode
    from ludus.env.serving.loopback import PlayOptions, open_client

    replays: list[Replay] = []
    options = PlayOptions(token=token, max_sessions=4)
    for _, group in itertools.groupby(episodes, lambda episode: episode.environment):
        group_episodes = list(group)
        group_server = server or make_recorded_factory(group_episodes[0])
        async with open_client(group_server, options) as client:
            replays += [await replay_episode(client, episode) for episode in group_episodes]
    return replays


def _print_replays(replays: list[Replay]) -> None:
    columns = ("episode", "environment", "seed", "steps", "return", "ended", "")
    table = make_table(*columns, number_columns=("episode", "seed", "steps", "return"))
    differences: list[str] = []
    for number, replay in enumerate(replays, 1):
        episode = replay.episode
        if not replay.is_same:
            differences.append(f"episode {number}, {replay.difference}")
        table.add_row(
            str(number),
            Text(episode.environment.target or episode.environment.name),
            str(episode.seed),
            f"{replay.num_steps}/{len(episode.steps)}",
            f"{episode.episode_return:g}",
            Text(episode.end_reason),
            "[green]same" if replay.is_same else "[bold red]differs",
        )
    console = get_stdout()
    console.print(table)
    num_same = len(replays) - len(differences)
    print_line(console, f"{num_same} of {len(replays)} episodes are the same")
    for difference in differences[:1]:
        print_line(console, f"first difference: {difference}", "yellow")
