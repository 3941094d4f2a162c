"""`ludus train`, which runs the trainer as a child process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from rich.status import Status
from typer.core import TyperCommand

from ludus.env.text.terminal import clean_for_terminal, format_notice
from ludus.proto.errors import ConfigError, NotFoundError, UserError
from ludus.proto.memory_plan import MemoryPlan
from ludus.proto.paths import describe_place, suggest_path
from ludus.proto.runs import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    NETWORK,
    SUMMARY_FILE,
    MetricsRow,
    ModelSize,
    Resume,
    Summary,
)
from ludus.services.cli.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    get_stderr,
    get_stdout,
    print_line,
    print_warning,
    write_json,
)
from ludus.services.cli.options import ConfigPath, Overrides
from ludus.services.cli.progress import RunProgress, show_progress
from ludus.services.cli.records_follower import RecordsFollower
from ludus.services.cli.run_end import list_result_lines
from ludus.services.cli.tables import make_summary_tables
from ludus.services.cli.trainer_process import TrainerEnd, run_trainer
from ludus.services.numbers import format_duration

if TYPE_CHECKING:
    from ludus.proto.config import RecordedRun, RunConfig


MAX_PLAN_LINE = 300
READY_TEXT = "nothing was written; --json prints every setting"
PrintsConfig = Annotated[
    bool,
    typer.Option("--json", help="With --dry-run: print the resolved configuration instead."),
]
ResumeOption = Annotated[
    Resume,
    typer.Option(
        "--resume",
        metavar="[=auto]",
        show_default=False,
        help="Resume from the latest checkpoint. With =auto, start a new run if there is none.",
    ),
]
OverwriteFlag = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace an existing run of the same name. Without it, only a run that has no "
        "checkpoint is replaced.",
    ),
]


class TrainCommand(TyperCommand):
    """A command whose option --resume may have a value, which Typer itself does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; --resume without a value means --resume=always."""
        always_flag = f"--resume={Resume.ALWAYS}"
        return super().parse_args(ctx, [always_flag if arg == "--resume" else arg for arg in args])


def train(
    config_path: ConfigPath = None,
    overrides: Overrides = None,
    is_dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything that could stop the run from starting, then print what it would "
            "do.",
        ),
    ] = False,
    prints_json: PrintsConfig = False,
    resume: ResumeOption = Resume.NEVER,
    overwrites: OverwriteFlag = False,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP]",
            help="Start another run from the latest checkpoint of a run, from that of a step, or "
            "from the `best`. The settings are those of the run; change them with --set, at least "
            "the name.",
        ),
    ] = None,
) -> None:
    """Train a policy, compare it with fixed policies, and write a report.

    Everything is written to runs/NAME/. Ctrl-C stops with a checkpoint, from which --resume
    continues. For a command that is repeated until it succeeds, use --resume=auto.

    Example: `ludus train examples/blackjack/tiny.toml --set training.num_steps=20`

    Example: `ludus train --from demo@100 --set name=demo2 --set learner.learning_rate=1e-4`
    """
    from ludus.proto.config import load_run_config

    trainer_flags = make_trainer_flags(resume, overwrites=overwrites)
    check_json_option(is_dry_run=is_dry_run, prints_json=prints_json)
    if origin is not None:
        if config_path is not None or trainer_flags:
            raise ConfigError(
                "--from takes the configuration of the run and writes a new folder; remove CONFIG, "
                "--resume and --overwrite"
            )
        _train_branch(origin, overrides or (), is_dry_run=is_dry_run, prints_json=prints_json)
        return
    config = load_run_config(config_path, overrides or ())
    if is_dry_run:
        _show_dry_run(_check_start(config, trainer_flags), prints_json=prints_json)
        return
    _check_environments(config)
    _train_and_show(config, trainer_flags)


def _train_branch(
    origin: str, overrides: Sequence[str], *, is_dry_run: bool, prints_json: bool
) -> None:
    """Start a run from a checkpoint of another run, after all checks."""
    from ludus.services.cli.branch import plan_branch, write_branch

    branch = plan_branch(origin, overrides)
    checked_run = _check_start(branch.config, [])
    if is_dry_run:
        _show_dry_run(checked_run, prints_json=prints_json)
        return
    write_branch(branch)
    print_line(get_stderr(), f"starting from {branch.checkpoint}")
    _train_and_show(branch.config, make_trainer_flags(Resume.ALWAYS, overwrites=False))


@dataclass(frozen=True, slots=True)
class _CheckedRun:
    """A run that can start."""

    config: RunConfig
    """The configuration with the settings that the trainer has resolved."""
    size: ModelSize | None
    """Size of a pretrained model."""
    memory_plan: MemoryPlan | None
    """Memory of a language-model run."""
    step_s: float | None
    """Measured seconds of a training step; None if no step was measured."""


def _check_start(config: RunConfig, flags: list[str]) -> _CheckedRun:
    """Check everything that could stop a run from starting; exit if something does."""
    end = run_quietly("checking", ["check", *flags], config)
    exit_on_failure(end, Path(config.output_dir) / config.name, "nothing was written")
    if end.output.resolved_config:
        config = type(config).model_validate_json(end.output.resolved_config)
    output = end.output
    return _CheckedRun(config, output.model_size, output.memory_plan, output.step_s)


def _train_and_show(config: RunConfig, flags: list[str]) -> None:
    """Train a run, then print its results and the next commands."""
    from ludus.proto.config import LanguageModelRun

    run_dir = Path(config.output_dir) / config.name
    end = run_training(config, run_dir, flags)
    exit_on_failure(end, run_dir, advise_next_command(run_dir))
    train_more = f"ludus train {run_dir / CONFIG_FILE} --resume --set training.num_steps={{more}}"
    commands = {"evaluate": f"ludus eval {run_dir}"}
    if isinstance(config, LanguageModelRun):
        commands["export"] = f"ludus export {run_dir} {config.name}-model"
    show_results(run_dir, commands | {"train more": train_more})


def _show_dry_run(run: _CheckedRun, *, prints_json: bool) -> None:
    """Print the configuration of a run that has been checked, or its plan."""
    from ludus.services.cli.run_plan import list_plan_lines

    if prints_json:
        write_json(run.config.model_dump_json(indent=2))
        return
    plan_lines = list_plan_lines(run.config, run.size, run.memory_plan, run.step_s)
    lines = [*plan_lines, ("ready", READY_TEXT)]
    width = max(len(title) for title, _ in lines) + 2
    for title, text in lines:
        line = clean_for_terminal(f"{title:<{width}}{text}")
        is_long = len(line) > MAX_PLAN_LINE
        print_line(get_stdout(), f"{line[: MAX_PLAN_LINE - 3]}..." if is_long else line)


def read_run_config(run_dir: Path) -> RunConfig:
    """Read the configuration in a run folder.

    Raises:
        NotFoundError: the folder is not a run folder.
    """
    from ludus.proto.config import load_run_config

    config_path = run_dir / CONFIG_FILE
    if not run_dir.exists():
        raise NotFoundError(
            f"there is no run folder '{run_dir}'{describe_place(run_dir)}; {suggest_path(run_dir)}"
        )
    if not config_path.is_file():
        raise NotFoundError(
            f"'{run_dir}' is not a run folder, because it has no {CONFIG_FILE}; name a folder "
            "that `ludus train` wrote, for example runs/demo"
        )
    return load_run_config(config_path)


def _check_environments(config: RunConfig) -> None:
    """Build each local environment once, to find mistakes before the trainer starts.

    Raises:
        UserError: a package, game or option does not exist.
    """
    from ludus.env.targets.targets import check_environment_options

    for environment in config.environments.values():
        if environment.kind == "local":
            check_environment_options(environment.package, environment.options).close()


def advise_next_command(run_dir: Path, command: str = "train") -> str:
    """Return the advice on how to continue a run that was stopped."""
    if any((run_dir / CHECKPOINTS_FOLDER).glob("step-*[0-9]")):
        return f"continue with: ludus {command} {run_dir / CONFIG_FILE} --resume"
    return "no checkpoint was written yet; the same command starts again"


def check_json_option(*, is_dry_run: bool, prints_json: bool) -> None:
    """Check that --json belongs to a dry run.

    Raises:
        ConfigError: it does not.
    """
    if prints_json and not is_dry_run:
        raise ConfigError("--json prints the configuration of a dry run; add --dry-run")


def make_trainer_flags(resume: Resume, *, overwrites: bool) -> list[str]:
    """Return the trainer's options for an existing run of the same name.

    Raises:
        ConfigError: both options are set.
    """
    if resume is not Resume.NEVER and overwrites:
        raise ConfigError("--resume cannot be combined with --overwrite; remove one")
    flags = ["--overwrite"] if overwrites else []
    return flags if resume is Resume.NEVER else [f"--resume={resume}"]


def run_training(config: RecordedRun, run_dir: Path, flags: list[str]) -> TrainerEnd:
    """Run the trainer, show the progress of the run, and return how the trainer ended."""
    unit = "conversations" if config.kind == "sft" else "episodes"
    progress = RunProgress(config.training.num_steps, unit=unit)
    follower = RecordsFollower(run_dir / METRICS_FILE, MetricsRow, skips_old_file=True)
    with show_progress(get_stderr()) as view:

        def refresh() -> None:
            progress.update(follower.read_new())
            view.refresh(progress)

        def show_stopping() -> None:
            progress.is_stopping = True
            view.refresh(progress)

        end = run_trainer(
            ["train", *flags], config, warn=view.warn, on_tick=refresh, on_stopping=show_stopping
        )
        if follower.num_unreadable:
            view.warn(f"{follower.num_unreadable} lines of {METRICS_FILE} cannot be read")
        view.finish(progress)
        return end


def run_quietly(
    activity: str,
    arguments: list[str],
    config: BaseModel | None = None,
    on_tick: Callable[[Status], None] = lambda status: None,
) -> TrainerEnd:
    """Run the trainer with a status line, show its warnings, and return how it ended.

    Args:
        on_tick: called several times per second with the status line.
    """
    console = get_stderr()
    with console.status(activity) as status:
        return run_trainer(
            arguments,
            config,
            warn=lambda message: print_warning(console, message),
            on_tick=lambda: on_tick(status),
            on_stopping=lambda: print_line(console, "stopping", style="yellow"),
        )


def exit_on_failure(end: TrainerEnd, run_dir: Path, advice: str) -> None:
    """If the trainer failed or was stopped, explain it and exit with the trainer's code.

    Args:
        advice: text to print if the trainer was stopped.
    """
    console = get_stderr()
    if end.was_stopped:
        outcome = "killed" if end.was_killed else "stopped"
        print_line(console, f"{outcome}; {advice}")
        raise typer.Exit(EXIT_INTERRUPTED)
    if end.exit_code == 0:
        return
    error_lines = [format_notice("error", message) for message in end.output.errors]
    for line in error_lines or [f"  {line}" for line in end.output.last_lines]:
        print_line(console, line)
    if end.exit_code == UserError.exit_code and error_lines:
        raise typer.Exit(UserError.exit_code)
    status_text = f"signal {-end.exit_code}" if end.exit_code < 0 else f"exit code {end.exit_code}"
    log_path = run_dir / LOG_FILE
    log_hint = f"; see {log_path}" if log_path.exists() else ""
    message = f"the trainer exited with {status_text}"
    if not error_lines:
        message = f"error: {message}; its last output is above"
    print_line(console, f"{message}{log_hint}")
    raise typer.Exit(end.exit_code if end.exit_code > 0 else EXIT_FAILED)


def show_results(run_dir: Path, next_commands: Mapping[str, str]) -> None:
    """Print a run's results, write its report, and print the next commands.

    Raises:
        NotFoundError: the run has no summary.
    """
    from ludus.services.report import write_report

    summary_path = run_dir / SUMMARY_FILE
    if not summary_path.is_file():
        raise NotFoundError(f"the trainer did not write '{summary_path}'; see {LOG_FILE}")
    try:
        summary = Summary.model_validate_json(summary_path.read_bytes())
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        field = ".".join(map(str, first_error["loc"])) or "the file"
        raise ConfigError(
            f"'{summary_path}' cannot be read: {field}: {first_error['msg']}; see {LOG_FILE}"
        ) from None
    report_path = write_report(run_dir)
    console = get_stdout()
    for table in make_summary_tables(summary):
        console.print(table)
    print_line(
        console,
        f"{summary.games_trained:,} episodes in"
        f" {format_duration(summary.wall_seconds_training)} of training"
        f" · {_describe_sampling(summary)}",
    )
    for title, text in [("report", str(report_path)), *list_result_lines(run_dir)]:
        print_line(console, f"{title:<11} {text}")
    for purpose, command in next_commands.items():
        command = command.replace("{more}", str(summary.num_steps * 2))
        print_line(console, f"{purpose:<11} {command}", style="dim")


def _describe_sampling(summary: Summary) -> str:
    if summary.generator == NETWORK:
        return "a network, by classic PPO"
    return (
        f"{summary.generator} engine · {summary.weight_syncs} weight syncs,"
        f" {summary.canary_failures} canary failures"
    )
