"""`ludus submit` and `ludus resume`: start runs on a cluster and follow them like local runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import expand_home
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
            callback=expand_home,
        ),
    ] = None,
) -> None:
    """Train on a cluster, as a RayJob built from the configuration and the installed release.

    Ctrl-C stops following the run, not the run. At its end, its results are copied to runs/NAME/.

    Example: `ludus submit examples/blackjack/tiny.toml --set training.num_steps=20`
    """
    from ludus.proto.config import load_run_config, require_language_model
    from ludus.services.runs.cluster import connect_cluster
    from ludus.services.runs.manifest import make_manifests
    from ludus.services.runs.platform import read_release_file

    if release_file is not None and not is_dry_run:
        raise ConfigError("--release-file needs --dry-run; remove it to submit the run")
    config = require_language_model(load_run_config(config_path, overrides or ()), "ludus submit")
    environments = _parse_environments(served_environments or ())
    if release_file is not None:
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
            results_folder = None if detaches else folder or Path("runs") / config.name
            await _start_run(cluster, manifests, ignored_checks or (), results_folder)
            await _follow_run(cluster, release, config.name, results_folder)

    options.run_until_signal(submit_run())


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

    A run that has trained all its steps needs more of them.

    Example: `ludus resume demo --set training.num_steps=200`
    """
    from ludus.services.cli.run_view import read_progress
    from ludus.services.runs import operations
    from ludus.services.runs.manifest import make_manifests
    from ludus.services.runs.results_folder import RunOrigin, check_results_folder

    config = await operations.load_resumable_config(cluster, run, overrides or ())
    release = await cluster.find_run_release(run, release_name)
    results_folder = None if detaches else folder or Path("runs") / run
    if results_folder is not None:
        origin = RunOrigin(name=run, output_dir=release.platform.output_dir)
        check_results_folder(results_folder, origin)
    manifests = make_manifests(config, release, queue=queue)
    await _check_cluster(cluster, manifests, ignored_checks or ())
    progress = await read_progress(cluster, run)
    await cluster.delete(run)
    await cluster.create(manifests)
    step = progress.step if progress is not None else None
    await _follow_run(cluster, release, run, results_folder, step)


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


async def _start_run(
    cluster: RunsCluster,
    manifests: RunManifests,
    ignored_checks: Sequence[str],
    folder: Path | None,
) -> None:
    """Check the cluster and the folder for the results, and create the run."""
    from ludus.services.runs import operations
    from ludus.services.runs.results_folder import check_new_folder

    await operations.refuse_existing(cluster, manifests.run.name)
    if folder is not None:
        check_new_folder(folder, manifests.run.name)
    await _check_cluster(cluster, manifests, ignored_checks)
    await cluster.create(manifests)


async def _follow_run(
    cluster: RunsCluster, release: Release, run: str, folder: Path | None, step: int | None = None
) -> None:
    """Show a run until it ends and copy its results, unless there is no folder for them."""
    from ludus.services.cli.run_view import show_end, watch

    console = get_stderr()
    print_line(console, f"run '{run}' submitted to namespace '{cluster.namespace}'")
    logs_command = cluster.format_command(f"logs -f {run}")
    if folder is None:
        print_line(console, f"follow it with: {logs_command}")
        return
    try:
        end = await watch(cluster, run, step=step)
    except NotFoundError:
        raise  # the run was deleted
    except BaseException:
        stop_command = cluster.format_command(f"stop {run}")
        print_line(console, f"the run continues; see: {logs_command}, {stop_command}")
        raise
    await show_end(cluster, release, end, folder)


def _print_manifests(manifests: RunManifests, output_format: ManifestFormat) -> None:
    import yaml

    from ludus.services.runs.cluster_checks import find_broken_rules

    for message in find_broken_rules(manifests):
        print_warning(get_stderr(), message)
    manifest_dicts = manifests.objects
    if output_format == "json":
        manifest_list = {"apiVersion": "v1", "kind": "List", "items": manifest_dicts}
        write_json(json.dumps(manifest_list, indent=2))
    else:
        typer.echo(yaml.safe_dump_all(manifest_dicts, sort_keys=False, width=100), nl=False)
