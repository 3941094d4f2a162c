"""`ludus env record`: writes the episodes of a fixed policy as conversations."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import expand_home
from ludus.services.cli.console import get_stderr, get_stdout, print_line
from ludus.services.cli.options import Options, Target, parse_options
from ludus.services.numbers import format_fixed, format_percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ludus.env.evaluation import FixedPolicy
    from ludus.env.recording.chats import ChatEpisode
    from ludus.env.targets.targets import TargetFactory


def record(
    target: Target,
    policy_name: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Fixed policy to record. `ludus env bench TARGET` compares all of them.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Output file (.jsonl).", callback=expand_home)
    ],
    num_episodes: Annotated[
        int, typer.Option("--episodes", min=1, help="Number of episodes to play.")
    ] = 1000,
    options: Options = None,
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
    min_return: Annotated[
        float | None,
        typer.Option(help="Lowest return of an episode that is written.", show_default="all"),
    ] = None,
    max_turns: Annotated[
        int, typer.Option(min=1, help="Number of turns after which an episode ends.")
    ] = 1000,
) -> None:
    """Write the episodes of a fixed policy as conversations, which `ludus sft` learns from.

    Each line has the messages of an episode, with its seed, return and success.

    Example: `ludus env record openspiel_env --option game=blackjack --policy basic_strategy
    --episodes 2000 --output games.jsonl`
    """
    from ludus.env.targets.targets import environment_factory

    if output.suffix != ".jsonl":
        raise ConfigError(f"--output must end with .jsonl, got '{output}'")
    factory = environment_factory(target, parse_options(options or ()))
    policy = _load_policy(target, factory, policy_name, policies_function)
    episodes = _play_episodes(factory, policy, range(seed, seed + num_episodes), max_turns)
    outcomes = _write_episodes(output, episodes, min_return)
    if not outcomes:
        raise ConfigError(
            f"none of {num_episodes} episodes has a return of at least --min-return = "
            f"{min_return:g}; lower it, or record another policy"
        )
    print_line(get_stdout(), f"{output}: {_describe_outcomes(policy_name, outcomes)}")


def _write_episodes(
    output: Path, episodes: Iterable[ChatEpisode], min_return: float | None
) -> list[tuple[float, bool | None]]:
    """Write episodes to a file, and return the return and the success of each written one.

    Without any episode to write, the file is not changed.
    """
    temporary_path = output.with_name(f".{output.name}.partial")
    outcomes: list[tuple[float, bool | None]] = []
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with temporary_path.open("w", encoding="utf-8") as file:
            for episode in episodes:
                if min_return is None or episode.episode_return >= min_return:
                    outcomes.append((episode.episode_return, episode.success))
                    file.write(json.dumps(episode.to_row(), ensure_ascii=False) + "\n")
        if outcomes:
            temporary_path.replace(output)
    except OSError as error:
        raise ConfigError(f"cannot write '{output}': {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            temporary_path.unlink()
    return outcomes


def _describe_outcomes(policy_name: str, outcomes: Sequence[tuple[float, bool | None]]) -> str:
    """Return the number of episodes, the mean return, and the share of successes if known."""
    mean_return = sum(episode_return for episode_return, _ in outcomes) / len(outcomes)
    text = f"{len(outcomes):,} episodes of '{policy_name}', mean return "
    text += format_fixed(mean_return, 3)
    if all(success is None for _, success in outcomes):
        return text
    share = sum(success is True for _, success in outcomes) / len(outcomes)
    return f"{text}, success {format_percent(share)}"


def _load_policy(
    target: str, factory: TargetFactory, name: str, policies_function: str
) -> FixedPolicy:
    from ludus.env.contract.schema import make_random_policy
    from ludus.env.targets.policies import find_policies_function, load_policies

    function_path = policies_function or find_policies_function(target)
    environment = factory()
    try:
        policies = {"random": make_random_policy(environment.action_type.model_json_schema())}
        if function_path:
            policies |= load_policies(function_path, environment.options)
    finally:
        environment.close()
    if name not in policies:
        raise NotFoundError(f"--policy must be one of {', '.join(policies)}, got '{name}'")
    return policies[name]


def _play_episodes(
    factory: TargetFactory, policy: FixedPolicy, seeds: range, max_turns: int
) -> Iterator[ChatEpisode]:
    from ludus.env.recording.chats import play_chat

    console = get_stderr()
    environment = factory()
    try:
        for seed in track(seeds, "playing", console=console, disable=not console.is_terminal):
            yield play_chat(environment, policy, seed, max_turns)
    finally:
        environment.close()
