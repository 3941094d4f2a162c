"""Options and arguments of several commands."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home
from ludus.proto.values import parse_value

# Runs.

Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or its name in runs/.")]
ConfigPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG",
        show_default=False,
        help="Configuration: .toml, .yaml or .json.",
        callback=expand_home,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Override a configuration field. Repeatable."),
]

# Environments.

TARGET_HELP = (
    "Target of `ludus env list` (openspiel:chess, gymnasium:CartPole-v1), package (uno_env),"
    " module:Class, openenv:module:Class, openenv:module:app"
)
Target = Annotated[str, typer.Argument(metavar="TARGET", help=f"{TARGET_HELP}.")]
TargetOrAddress = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|ADDRESS",
        help=f"{TARGET_HELP}; or the http://, ws:// or grpc:// address of a running server.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="Option for the environment's constructor. Repeatable.",
    ),
]
TokenEnv = Annotated[
    str, typer.Option(help="Environment variable with the token, if the server needs one.")
]

# Runs on a cluster.

RunName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the run. `ludus list` shows all runs.")
]
Context = Annotated[
    str, typer.Option(help="Kubeconfig context to use.", show_default="current context")
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", help="Namespace of the runs.", show_default="namespace of the context"
    ),
]
ReleaseName = Annotated[
    str | None,
    typer.Option(
        "--release", help="Helm release of Ludus.", show_default="the only one in the namespace"
    ),
]
ServedEnvironments = Annotated[
    list[str] | None,
    typer.Option(
        "--environment",
        metavar="NAME=SERVED",
        help="Map an environment of the run to the name it has in the release, if they differ. "
        "Repeatable.",
    ),
]
Queue = Annotated[
    str | None,
    typer.Option(help="Kueue LocalQueue for the run.", show_default="queue of the release"),
]
IgnoredChecks = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="CHECK",
        help="Skip a check: operator, rules, queue, secrets, volumes, nodes, quota or admission. "
        "Repeatable.",
    ),
]
DetachFlag = Annotated[
    bool, typer.Option("--detach", "-d", help="Return once the run is submitted; do not follow it.")
]
ResultsFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for the results.",
        show_default="runs/NAME",
        callback=expand_home,
    ),
]


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Parse options of the form KEY=VALUE, whose values are JSON, TOML or text."""
    values: dict[str, Any] = {}
    for option in options:
        key, separator, value_text = option.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ConfigError(
                f"--option must be KEY=VALUE, got '{option}'; for example --option game=blackjack"
            )
        values[key] = parse_value(value_text, f"--option {key}")
    return values


def run_until_signal(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; SIGINT, SIGTERM and SIGHUP cancel it, so that it can clean up.

    A signal that this process ignores, for example under nohup, stays ignored.

    Raises:
        KeyboardInterrupt: a signal cancelled the coroutine.
    """

    async def cancel_on_signals() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signal_number) is not signal.SIG_IGN:
                loop.add_signal_handler(signal_number, task.cancel)
        await coroutine

    try:
        asyncio.run(cancel_on_signals())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def make_cluster_command(
    coroutine_function: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Build a command from a coroutine function whose first parameter is a RunsCluster.

    The command connects to the cluster and calls the function. Its parameters are the function's
    other parameters and the options --namespace and --context.
    """

    def sync_command(namespace: str, context: str, **arguments: Any) -> None:
        async def connect_and_run() -> None:
            from ludus.services.runs.cluster import connect_cluster

            async with connect_cluster(context, namespace) as cluster:
                await coroutine_function(cluster, **arguments)

        run_until_signal(connect_and_run())

    # RunsCluster is imported only for type checking, so its annotation needs a replacement.
    signature = inspect.signature(coroutine_function, locals={"RunsCluster": Any}, eval_str=True)
    _, *parameters = signature.parameters.values()
    cluster_parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=annotation)
        for name, annotation in (("namespace", Namespace), ("context", Context))
    ]
    sync_command.__doc__ = coroutine_function.__doc__
    sync_command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters, *cluster_parameters]
    )
    return sync_command
