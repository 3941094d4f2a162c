"""`ludus submit` and `ludus resume`: runs on a cluster, followed like local runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.services.cli import cluster_options as options
from ludus.services.cli.console import print_line, progress_console
from ludus.services.cli.train_command import Overrides

if TYPE_CHECKING:
    from ludus.proto.config import LanguageModelRun
    from ludus.services.runs.cluster import RunsCluster
    from ludus.services.runs.manifest import RunManifests
    from ludus.services.runs.platform import Release


class Format(StrEnum):
    """Format of printed manifests."""

    YAML = "yaml"
    JSON = "json"


def submit(
    config_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", show_default=False, help="Run configuration: .toml, .yaml or .json."
        ),
    ] = None,
    overrides: Overrides = None,
    release: options.ReleaseName = None,
    namespace: options.Namespace = "",
    context: options.Context = "",
    environment: options.Environments = None,
    queue: options.Queue = None,
    ignore: options.Ignored = None,
    detach: options.Detach = False,
    folder: options.Output = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be created, and create nothing.")
    ] = False,
    output_format: Annotated[
        Format, typer.Option("-o", "--format", help="Format of the manifests with --dry-run.")
    ] = Format.YAML,
    release_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Output of `helm template`, used with --dry-run when there is no cluster.",
        ),
    ] = None,
) -> None:
    """Train on a cluster: a RayJob made from the run and the installed release.

    Ctrl-C stops following the run, not the run itself. When the run ends, its results are copied
    to runs/NAME/.

    Example: `ludus submit examples/blackjack/tiny.toml --set training.num_steps=20`
    """
    from ludus.proto.config import load_run_config, require_language_model

    config = require_language_model(load_run_config(config_path, overrides or ()), "ludus submit")
    choices = options.parse_pairs(environment or (), "--environment")
    submission = _Chosen(release, namespace, context, queue, ignore or (), detach, folder, choices)
    if release_file is not None and not dry_run:
        raise ConfigError("--release-file needs --dry-run; remove it to submit the run")
    options.run_coroutine(
        _print_manifests(config, submission, output_format, release_file)
        if dry_run
        else _submit_run(config, submission)
    )


def resume(
    run: options.Run,
    overrides: Overrides = None,
    release: options.ReleaseName = None,
    namespace: options.Namespace = "",
    context: options.Context = "",
    queue: options.Queue = None,
    ignore: options.Ignored = None,
    detach: options.Detach = False,
    folder: options.Output = None,
) -> None:
    """Resume a run on a cluster from its latest checkpoint.

    Example: `ludus resume demo --set training.num_steps=200`
    """
    submission = _Chosen(release, namespace, context, queue, ignore or (), detach, folder)
    options.run_coroutine(_resume_run(run, overrides or (), submission))


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Options of a submission."""

    release: str | None
    namespace: str
    context: str
    queue: str | None
    ignored: Sequence[str]
    detach: bool
    folder: Path | None
    environments: Mapping[str, str] = field(default_factory=dict)


async def _submit_run(config: LanguageModelRun, chosen: _Chosen) -> None:
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connect_cluster
    from ludus.services.runs.manifest import make_manifests

    async with connect_cluster(chosen.context, chosen.namespace) as cluster:
        release = await cluster.release(chosen.release)
        manifests = make_manifests(config, release, chosen.environments, chosen.queue)
        await operations.refuse_existing(cluster, config.name)
        await _check_cluster(cluster, manifests, chosen.ignored)
        await cluster.create(manifests)
        await _follow_run(cluster, release, manifests, chosen)


async def _resume_run(run: str, overrides: Sequence[str], chosen: _Chosen) -> None:
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connect_cluster
    from ludus.services.runs.manifest import make_manifests

    async with connect_cluster(chosen.context, chosen.namespace) as cluster:
        config = await operations.load_resumable_config(cluster, run, overrides)
        release = await cluster.release(chosen.release)
        manifests = make_manifests(config, release, queue=chosen.queue)
        await _check_cluster(cluster, manifests, chosen.ignored)
        await operations.resume(cluster, manifests)
        await _follow_run(cluster, release, manifests, chosen)


async def _check_cluster(
    cluster: RunsCluster, manifests: RunManifests, ignored: Sequence[str]
) -> None:
    from ludus.services.runs.cluster_checks import check_cluster

    console = progress_console()
    with console.status("checking the cluster"):
        findings = await check_cluster(cluster, manifests, ignored)
    for note in findings.notes:
        print_line(console, f"note: {note}", style="dim")
    findings.raise_if_any()


async def _follow_run(
    cluster: RunsCluster, release: Release, manifests: RunManifests, chosen: _Chosen
) -> None:
    from ludus.services.cli.run_view import show_end, watch

    run, console = manifests.run, progress_console()
    print_line(console, f"run '{run.name}' submitted to namespace '{cluster.namespace}'")
    if chosen.detach:
        print_line(console, f"follow it with: ludus logs -f {run.name}")
        return
    try:
        end = await watch(cluster, run.name)
    except NotFoundError:
        raise  # the run was deleted
    except BaseException:
        print_line(
            console, f"the run continues; see: ludus logs -f {run.name}, ludus stop {run.name}"
        )
        raise
    await show_end(cluster, release, end, chosen.folder or Path("runs") / run.name)


async def _print_manifests(
    config: LanguageModelRun, chosen: _Chosen, output_format: Format, release_file: Path | None
) -> None:
    from ludus.services.runs.cluster import connect_cluster
    from ludus.services.runs.manifest import make_manifests
    from ludus.services.runs.platform import read_release_file
    from ludus.services.runs.rules import broken_rules

    if release_file is not None:
        release = read_release_file(release_file, chosen.release)
    else:
        async with connect_cluster(chosen.context, chosen.namespace) as cluster:
            release = await cluster.release(chosen.release)
    manifests = make_manifests(config, release, chosen.environments, chosen.queue)
    for message in broken_rules(manifests.job):
        print_line(progress_console(), f"warning: {message}", style="yellow")
    typer.echo(_format_documents([manifests.config_map, manifests.job], output_format), nl=False)


def _format_documents(documents: list[dict[str, object]], output_format: Format) -> str:
    import yaml

    if output_format is Format.JSON:
        items = {"apiVersion": "v1", "kind": "List", "items": documents}
        return json.dumps(items, indent=2) + "\n"
    return yaml.safe_dump_all(documents, sort_keys=False, width=100)
