"""`ludus env replay`: recorded episodes once more, compared step by step.

FILE --> episodes --grouped by environment--> a server for each --> table, first differences
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
from ludus.services.cli.console import results_console, say
from ludus.services.cli.env_places import Options, TokenEnv
from ludus.services.cli.options import parse_options
from ludus.services.cli.tables import new_table

if TYPE_CHECKING:
    from ludus.env.recording.format import RecordedEpisode
    from ludus.env.recording.verify import Replay

REPLAY_FAILED = 1


def replay(
    file: Annotated[Path, typer.Argument(help="A recording, or a folder of them.")],
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="Play on this; else on what the recording names."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Play on this running server, http:// or grpc://.")
    ] = None,
    options: Options = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Episodes to play.")] = None,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
) -> None:
    """Play recorded episodes again and compare; exit code 1 when one goes another way.

    Example: `ludus env replay games.jsonl`

    Example: `ludus env replay games.jsonl --address grpc://127.0.0.1:18000 --limit 100`
    """
    from ludus.env.recording.format import read_recording

    chosen = parse_options(options or ())
    if address is not None and (target is not None or chosen):
        raise ConfigError("expected TARGET with --option, or --address; got both; leave one out")
    if chosen and target is None:
        raise ConfigError("expected TARGET with --option, got --option alone; name the target")
    episodes = list(itertools.islice(read_recording(file), limit))
    if not episodes:
        raise ConfigError(f"expected recorded episodes in '{file}', got none")
    place = address or _factory(target, chosen)
    replays = asyncio.run(_replay_all(episodes, place, os.environ.get(token_env)))
    _show(replays)
    if not all(one.is_same for one in replays):
        raise typer.Exit(REPLAY_FAILED)


def _factory(target: str | None, options: dict[str, Any]) -> Any:
    if target is None:
        return None
    from ludus.env.targets.targets import environment_factory

    return environment_factory(target, options)


async def _replay_all(
    episodes: list[RecordedEpisode], place: Any, token: str | None
) -> list[Replay]:
    """The replays in the order of the recording; neighbours of one environment share a server."""
    from ludus.env.recording.verify import recorded_factory, replay_episode
    from ludus.env.serving.loopback import PlayOptions, connected

    replays: list[Replay] = []
    options = PlayOptions(token=token, max_sessions=4)
    for _, group in itertools.groupby(episodes, lambda episode: episode.environment):
        alike = list(group)
        async with connected(place or recorded_factory(alike[0]), options) as client:
            replays += [await replay_episode(client, episode) for episode in alike]
    return replays


def _show(replays: list[Replay]) -> None:
    table = new_table()
    for name in ("episode", "environment", "seed", "steps", "return", "ended", ""):
        is_number = name in ("episode", "seed", "steps", "return")
        table.add_column(name, justify="right" if is_number else "left")
    for number, one in enumerate(replays, 1):
        episode = one.episode
        verdict = Text("same", style="green") if one.is_same else Text("differs", style="bold red")
        table.add_row(
            str(number),
            Text(episode.environment.target or episode.environment.name),
            str(episode.seed),
            f"{one.num_steps}/{len(episode.steps)}",
            f"{episode.episode_return:g}",
            Text(episode.end_reason),
            verdict,
        )
    console = results_console()
    console.print(table)
    num_same = sum(one.is_same for one in replays)
    say(console, f"{num_same} of {len(replays)} episodes went the same way")
    first = next(((n, one) for n, one in enumerate(replays, 1) if not one.is_same), None)
    if first is not None:
        say(console, f"first difference: episode {first[0]}, {first[1].difference}", "yellow")
