"""`ludus train` and `ludus eval`: both run the trainer as a child process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from ludus.proto.errors import ConfigError, NotFoundError, UserError
from ludus.proto.runs import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    EVAL_FILE,
    LOG_FILE,
    METRICS_FILE,
    NETWORK,
    SUMMARY_FILE,
    Evaluation,
    MetricsRow,
    Resume,
    Summary,
)
from ludus.services.cli.console import progress_console, results_console, say
from ludus.services.cli.live_view import progress_view
from ludus.services.cli.progress import RunProgress
from ludus.services.cli.records_follower import RecordsFollower
from ludus.services.cli.tables import eval_tables, summary_tables
from ludus.services.cli.trainer_process import (
    STOP_GRACE_S,
    TrainerEnd,
    TrainerOutput,
    run_trainer,
)
from ludus.services.numbers import format_duration

if TYPE_CHECKING:
    from ludus.proto.config import RunConfig

INTERRUPTED = 130
FAILED = 1

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Override one field; may be repeated."),
]


class TrainCommand(TyperCommand):
    """Lets --resume stand alone or with a value: Typer's options always or never have one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, where --resume alone means --resume=always."""
        always = f"--resume={Resume.ALWAYS}"
        return super().parse_args(ctx, [always if arg == "--resume" else arg for arg in args])


def train(
    config_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", show_default=False, help="Run configuration: .toml, .yaml or .json."
        ),
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Look at all that a start would trip over, and print the resolved configuration.",
        ),
    ] = False,
    resume: Annotated[
        Resume,
        typer.Option(
            "--resume",
            metavar="[=auto]",
            show_default=False,
            help="Go on from the run's latest checkpoint; with =auto begin where there is none.",
        ),
    ] = Resume.NEVER,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run of that name.")
    ] = False,
) -> None:
    """Train a policy, judge it against fixed policies and write a report.

    Everything goes to runs/NAME/. Ctrl-C writes a checkpoint; --resume continues from it. A
    command that may be repeated until it ends well has --resume=auto.

    Example: `ludus train examples/blackjack/tiny.toml --set training.num_steps=20`
    """
    from ludus.proto.config import load_run_config

    config = load_run_config(config_path, overrides or ())
    if resume is not Resume.NEVER and overwrite:
        raise ConfigError("expected --resume or --overwrite, got both; choose one")
    run_dir = Path(config.output_dir) / config.name
    flags = ["--overwrite"] if overwrite else []
    if resume is not Resume.NEVER:
        flags.append(f"--resume={resume}")
    if dry_run:
        exit_unless_well(_run_check(config, flags), run_dir, "nothing was written")
        typer.echo(config.model_dump_json(indent=2))
        return
    _check_environments(config)
    end = _run_training(config, run_dir, flags)
    exit_unless_well(end, run_dir, _way_on(run_dir))
    show_results(
        run_dir,
        {
            "judge again": f"ludus eval {run_dir}",
            "train on": f"ludus train {run_dir / CONFIG_FILE} --resume "
            "--set training.num_steps={more}",
        },
    )


def evaluate(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, for example runs/demo.")
    ],
    games: Annotated[
        int | None, typer.Option(min=1, help="Games to play; eval.num_games if not set.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 takes the likeliest token; eval.temperature if not set."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Checkpoint folder; the run's latest if not set."),
    ] = None,
) -> None:
    """Judge a trained policy against fixed policies on the same deals.

    Writes RUN_DIR/eval.json.

    Example: `ludus eval runs/demo --games 20000 --temperature 0`
    """
    config_of_run(run_dir)
    output = run_dir / EVAL_FILE
    arguments = ["eval", "--config", str(run_dir / CONFIG_FILE), "--run-dir", str(run_dir)]
    choices = {"--checkpoint": checkpoint, "--games": games, "--temperature": temperature}
    for flag, value in choices.items():
        if value is not None:
            arguments += [flag, str(value)]
    end = run_quietly("evaluating", [*arguments, "--output", str(output)])
    exit_unless_well(end, run_dir, "nothing was written")
    evaluation = Evaluation.model_validate_json(output.read_bytes())
    console = results_console()
    for part in eval_tables(evaluation):
        console.print(part)
    say(console, f"written to {output}", style="dim")


def config_of_run(run_dir: Path) -> RunConfig:
    """The configuration that a run was started with.

    Raises:
        NotFoundError: it is no run's folder.
    """
    from ludus.proto.config import load_run_config

    config_path = run_dir / CONFIG_FILE
    if not config_path.is_file():
        raise NotFoundError(
            f"expected a run's folder with {CONFIG_FILE}, got '{run_dir}' without; "
            "give a folder that `ludus train` wrote, for example runs/demo"
        )
    return load_run_config(config_path)


def _check_environments(config: RunConfig) -> None:
    """Build each environment once: other mistakes cost no start of the trainer.

    Raises:
        UserError: there is no such package, game or option.
    """
    from ludus.env.targets.targets import environment_factory

    for environment in config.environments.values():
        if environment.kind == "local":
            environment_factory(environment.package, environment.options)().close()


def _way_on(run_dir: Path) -> str:
    """What to do with a run that was stopped."""
    if any((run_dir / CHECKPOINTS_FOLDER).glob("step-*[0-9]")):
        return f"continue with: ludus train {run_dir / CONFIG_FILE} --resume"
    return "no checkpoint was written yet; the same command begins anew"


def _run_check(config: RunConfig, flags: list[str]) -> TrainerEnd:
    with tempfile.TemporaryDirectory(prefix="ludus-") as folder:
        resolved = Path(folder) / CONFIG_FILE
        resolved.write_text(config.model_dump_json(indent=2), encoding="utf-8")
        return run_quietly("checking", ["check", "--config", str(resolved), *flags])


def _run_training(config: RunConfig, run_dir: Path, flags: list[str]) -> TrainerEnd:
    console = progress_console()
    progress = RunProgress(config.training.num_steps)
    follower = RecordsFollower(run_dir / METRICS_FILE, MetricsRow, skip_old=True)
    with tempfile.TemporaryDirectory(prefix="ludus-") as folder:
        resolved = Path(folder) / CONFIG_FILE
        resolved.write_text(config.model_dump_json(indent=2), encoding="utf-8")
        with progress_view(console) as view:

            def show(output: TrainerOutput) -> None:
                progress.update(follower.new())
                while output.warnings:
                    view.warn(output.warnings.popleft())
                view.refresh(progress)

            def show_stopping() -> None:
                progress.is_stopping = True
                view.refresh(progress)

            end = run_trainer(
                ["train", "--config", str(resolved), *flags],
                on_tick=show,
                on_stopping=show_stopping,
            )
            if follower.num_unreadable:
                view.warn(f"{follower.num_unreadable} lines of {METRICS_FILE} cannot be read")
            view.finish(progress)
            return end


def run_quietly(doing: str, arguments: list[str]) -> TrainerEnd:
    """How the trainer ended, of which nothing but its warnings is shown."""
    console = progress_console()

    def show(output: TrainerOutput) -> None:
        while output.warnings:
            say(console, f"warning: {output.warnings.popleft()}", style="yellow")

    with console.status(doing):
        return run_trainer(
            arguments, on_tick=show, on_stopping=lambda: say(console, "stopping", style="yellow")
        )


def exit_unless_well(end: TrainerEnd, run_dir: Path, after_stop: str) -> None:
    """Explain any end but a good one, and exit with its code."""
    console = progress_console()
    if end.was_stopped:
        how = f"killed after {STOP_GRACE_S:.0f} s" if end.was_killed else "stopped"
        say(console, f"{how}; {after_stop}")
        raise typer.Exit(INTERRUPTED)
    if end.exit_code == 0:
        return
    errors = "\n".join(f"error: {message}" for message in end.output.errors)
    if end.exit_code == UserError.exit_code and errors:
        say(console, errors)
        raise typer.Exit(UserError.exit_code)
    _explain_crash(console, end, errors, run_dir)
    raise typer.Exit(end.exit_code if end.exit_code > 0 else FAILED)


def _explain_crash(console: Console, end: TrainerEnd, errors: str, run_dir: Path) -> None:
    said = errors or "\n".join(f"  {line}" for line in end.output.tail)
    if said:
        say(console, said)
    how = f"signal {-end.exit_code}" if end.exit_code < 0 else f"exit code {end.exit_code}"
    log = run_dir / LOG_FILE
    more = f"; more in {log}" if log.exists() else ""
    if errors:
        say(console, f"the trainer ended with {how}{more}")
    else:
        say(console, f"error: the trainer ended with {how}; its last words stand above{more}")


def show_results(run_dir: Path, ways_on: Mapping[str, str]) -> None:
    """Show what a run came to, write its report, and name the commands that go on from here.

    Raises:
        NotFoundError: it has no summary.
    """
    from ludus.services.report import write_report

    path = run_dir / SUMMARY_FILE
    if not path.is_file():
        raise NotFoundError(f"expected the trainer to leave '{path}', found none; see {LOG_FILE}")
    summary = Summary.model_validate_json(path.read_bytes())
    report = write_report(run_dir)
    console = results_console()
    for part in summary_tables(summary):
        console.print(part)
    say(
        console,
        f"{summary.games_trained:,} games in"
        f" {format_duration(summary.wall_seconds_training)} of training"
        f" · {_how(summary)}",
    )
    say(console, f"report      {report}")
    for what, command in ways_on.items():
        command = command.replace("{more}", str(summary.num_steps * 2))
        say(console, f"{what:<11} {command}", style="dim")


def _how(summary: Summary) -> str:
    """What sampled, and how the weights came there."""
    if summary.generator == NETWORK:
        return "a network, by classic PPO"
    return (
        f"{summary.generator} generator · {summary.weight_syncs} weight syncs,"
        f" {summary.canary_failures} canary failures"
    )
