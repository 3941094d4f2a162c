"""`ludus submit` and `ludus resume`: start runs on a cluster and follow them like local runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.services.cli import options
from ludus.services.cli.console import get_stderr, print_line, print_warning, write_json

if TYPE_CHECKING:
    from ludus.services.runs.cluster import RunsCluster
    from ludus.services.runs.manifest import RunManifests
    from ludus.services.runs.platform import Release


ManifestFormat = Literal["yaml", "json"]


def submit(
    config_path: options.ConfigPath = None,
    overrides: options.Overrides = None,
    release_name: options.ReleaseName = None,
    namespace: options.Namespace = "",
    context: options.Context = "",
    served_environments: options.ServedEnvironments = None,
    queue: options.Queue = None,
    ignored_checks: options.IgnoredChecks = None,
    detaches: options.DetachFlag = False,
    folder: options.ResultsFolder = None,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be created, and create nothing.")
    ] = False,
    output_format: Annotated[
        ManifestFormat,
        typer.Option("-o", "--format", help="Format of the manifests with --dry-run."),
    ] = "yaml",
    release_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Output of `helm template`, used with --dry-run when there is no cluster.",
        ),
    ] = None,
) -> None:
    """Train on a cluster, as a RayJob built from the configuration and the installed release.

    Ctrl-C stops following the run, not the run. At its end, its results are copied to runs/NAME/.

    Example: `ludus submit examples/blackjack/tiny.toml --set training.num_steps=20`
    """
    from ludus.proto.config import load_run_config, require_language_model
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connect_cluster
    from ludus.services.runs.manifest import make_manifests
    from ludus.services.runs.platform import read_release_file

    config = require_language_model(load_run_config(config_path, overrides or ()), "ludus submit")
    environments = _parse_environments(served_environments or ())
    if release_file is not None:
        if not is_dry_run:
            raise ConfigError("--release-file needs --dry-run; remove it to submit the run")
        release = read_release_file(release_file, release_name)
        _print_manifests(make_manifests(config, release, environments, queue), output_format)
        return

    async def submit_run() -> None:
        async with connect_cluster(context, namespace) as cluster:
            release = await cluster.read_release(release_name)
            manifests = make_manifests(config, release, environments, queue)
            if is_dry_run:
                _print_manifests(manifests, output_format)
                return
            await operations.refuse_existing(cluster, config.name)
            await _check_cluster(cluster, manifests, ignored_checks or ())
            await cluster.create(manifests)
            await _follow_run(cluster, release, config.name, detaches, folder)

    asyncio.run(submit_run())


@options.make_cluster_command
async def resume(
    cluster: RunsCluster,
    run: options.RunName,
    overrides: options.Overrides = None,
    release_name: options.ReleaseName = None,
    queue: options.Queue = None,
    ignored_checks: options.IgnoredChecks = None,
    detaches: options.DetachFlag = False,
    folder: options.ResultsFolder = None,
) -> None:
    """Resume a run on a cluster from its latest checkpoint.

    Example: `ludus resume demo --set training.num_steps=200`
    """
    from ludus.services.runs import operations
    from ludus.services.runs.manifest import make_manifests

    config = await operations.load_resumable_config(cluster, run, overrides or ())
    release = await cluster.read_release(release_name)
    manifests = make_manifests(config, release, queue=queue)
    await _check_cluster(cluster, manifests, ignored_checks or ())
    await cluster.delete(run)
    await cluster.create(manifests)
    await _follow_run(cluster, release, run, detaches, folder)


def _parse_environments(options: Sequence[str]) -> dict[str, str]:
    served_names = {}
    for option in options:
        name, _, served_name = option.partition("=")
        if not name or not served_name:
            raise ConfigError(f"--environment must be NAME=SERVED, got '{option}'")
        served_names[name] = served_name
    return served_names


async def _check_cluster(
    cluster: RunsCluster, manifests: RunManifests, ignored_checks: Sequence[str]
) -> None:
    from ludus.services.runs.cluster_checks import check_cluster

    console = get_stderr()
    with console.status("checking the cluster"):
        findings = await check_cluster(cluster, manifests, ignored_checks)
    for note in findings.notes:
        print_line(console, f"note: {note}", style="dim")
    findings.raise_problems()


async def _follow_run(
    cluster: RunsCluster, release: Release, run: str, detaches: bool, folder: Path | None
) -> None:
    from ludus.services.cli.run_view import show_end, watch

    console = get_stderr()
    print_line(console, f"run '{run}' submitted to namespace '{cluster.namespace}'")
    if detaches:
        print_line(console, f"follow it with: ludus logs -f {run}")
        return
    try:
        state, trainer_output = await watch(cluster, run)
    except NotFoundError:
        raise  # the run was deleted
    except BaseException:
        print_line(console, f"the run continues; see: ludus logs -f {run}, ludus stop {run}")
        raise
    await show_end(cluster, release, state, trainer_output, folder or Path("runs") / run)


def _print_manifests(manifests: RunManifests, output_format: ManifestFormat) -> None:
    import yaml

    from ludus.services.runs.cluster_checks import find_broken_rules

    for message in find_broken_rules(manifests):
        print_warning(get_stderr(), message)
    manifest_dicts = [manifests.config_map, manifests.job]
    if output_format == "json":
        manifest_list = {"apiVersion": "v1", "kind": "List", "items": manifest_dicts}
        write_json(json.dumps(manifest_list, indent=2))
    else:
        typer.echo(yaml.safe_dump_all(manifest_dicts, sort_keys=False, width=100), nl=False)
