"""`ludus eval --model`: evaluates models without a run, in a child process.

options --> LanguageModelRun --> child --rows--> progress, tables, JSON, report
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.status import Status
from rich.text import Text

from ludus.env.evaluation import summarize
from ludus.env.sessions.options import count_available_cpus
from ludus.env.targets.targets import environment_factory
from ludus.env.text.terminal import clean_for_terminal
from ludus.proto.config import LanguageModelRun
from ludus.proto.config.load import make_run_config
from ludus.proto.config.section import MAX_VLLM_TEMPERATURE, MIN_TEMPERATURE
from ludus.proto.errors import ConfigError
from ludus.proto.evaluations import EVALUATION_ROWS_FILE, EvaluationRow, ModelEvaluation
from ludus.proto.runs import PolicyResult
from ludus.proto.seeds import FIRST_EVAL_SEED
from ludus.proto.wording import choose_wording
from ludus.services.cli.console import get_stderr, get_stdout, print_line
from ludus.services.cli.env_targets import MAX_PROCESSES, require_options_only_for_targets
from ludus.services.cli.eval_results import CollectedRows, has_valid, make_evaluation
from ludus.services.cli.options import parse_options
from ludus.services.cli.records_follower import RecordsFollower
from ludus.services.cli.tables import make_model_tables
from ludus.services.cli.train_command import exit_on_failure, run_quietly
from ludus.services.numbers import (
    format_duration,
    format_fixed,
    format_fixed_interval,
    format_percent,
    format_percent_interval,
)
from ludus.services.report.evaluation_page import write_evaluation_report
from ludus.services.report.files import write_atomically

GENERATORS = ("transformers", "vllm")
MAX_TOKENS = 8192
"""Maximum number of tokens of an episode if the model's context is longer."""
DEFAULT_COMPLETION_TOKENS = 256
MAX_COMPLETION_TOKENS = 2**31
MAX_EPISODES = 2**24
MAX_SEED = 2**32
MAX_TEMPERATURE = 1000.0
PLAIN_INTERVAL_S = 5.0
"""Minimum time between two lines of progress if there is no terminal, in seconds."""
_EPISODE_TIMEOUT_S = 3600.0
_NO_TIMEOUT_S = 1e9
_MAX_CONCURRENT = {"transformers": 64, "vllm": 256}
"""Maximum number of concurrent episodes, by engine."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of an evaluation of models."""

    models: tuple[str, ...]
    target: str | None
    """Target or address of the environment."""
    options: tuple[str, ...]
    num_episodes: int
    temperature: float
    generator: str | None
    seed: int
    max_completion_tokens: int | None
    """Maximum number of tokens of a completion; None lowers the default for short contexts."""
    uses_tools: bool
    baselines: tuple[str, ...]
    endpoint: str | None
    token_env: str
    json_path: Path | None
    report_path: Path | None
    overrides: tuple[str, ...]


def evaluate_models(options: ModelOptions) -> None:
    """Evaluate models and fixed policies on the same seeds, and show and write the result.

    Raises:
        UserError: an option is wrong, or the environment cannot be built.
    """
    _check_options(options)
    run = _make_run(options)
    with tempfile.TemporaryDirectory(prefix="ludus-eval-") as folder:
        view = _ProgressView(Path(folder) / EVALUATION_ROWS_FILE)
        arguments = ["eval-models", "--folder", folder]
        arguments += [f"--model={model}" for model in options.models]
        arguments += [f"--baseline={baseline}" for baseline in options.baselines]
        if options.max_completion_tokens is not None:
            arguments.append("--exact-completion-tokens")
        if options.endpoint is not None:
            arguments += [f"--endpoint={options.endpoint}", f"--token-env={options.token_env}"]
        end = run_quietly("checking the models", arguments, run, view.refresh)
        evaluation = _make_result(view.rows, run, options, is_finished=end.exit_code == 0)
        if evaluation is not None:
            _show(evaluation, options)
        exit_on_failure(end, Path(folder), _advise_after_stop(evaluation))


def _check_options(options: ModelOptions) -> None:
    """Check the options that need neither a model nor an environment."""
    if not options.models:
        raise ConfigError(
            "ludus eval needs a RUN_DIR, or --model and --env; for example: ludus eval runs/demo"
        )
    if options.target is None:
        raise ConfigError(
            f"--model {options.models[0]} needs an environment; add --env, for example "
            "--env openspiel_env --option game=blackjack"
        )
    repeated_models = [model for model in options.models if options.models.count(model) > 1]
    if repeated_models:
        raise ConfigError(f"--model {repeated_models[0]} is given twice; remove one")
    if options.generator is not None and options.generator not in GENERATORS:
        raise ConfigError(
            f"--generator must be one of {', '.join(GENERATORS)}, got '{options.generator}'"
        )
    if options.generator is not None and options.endpoint is not None:
        raise ConfigError("--generator cannot be combined with --endpoint, which samples; omit one")
    _check_numbers(options)
    for name, path in (("--json", options.json_path), ("--report", options.report_path)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            problem = "is a folder" if path.is_dir() else f"needs the folder '{path.parent}'"
            raise ConfigError(f"{name} '{path}' {problem}; name a file in an existing folder")


def _check_numbers(options: ModelOptions) -> None:
    max_temperature = MAX_VLLM_TEMPERATURE if options.generator == "vllm" else MAX_TEMPERATURE
    if options.temperature and not MIN_TEMPERATURE <= options.temperature <= max_temperature:
        raise ConfigError(
            f"--temperature must be 0, or a number from {MIN_TEMPERATURE:g} to "
            f"{max_temperature:g}, got {options.temperature:g}"
        )
    limits = {
        "--episodes": (options.num_episodes, 1, MAX_EPISODES),
        "--max-completion-tokens": (_get_completion_tokens(options), 1, MAX_COMPLETION_TOKENS),
        "--seed": (options.seed, 0, MAX_SEED),
    }
    for name, (value, lowest, highest) in limits.items():
        if not lowest <= value <= highest:
            raise ConfigError(f"{name} must be a number from {lowest} to {highest}, got {value}")


def _get_completion_tokens(options: ModelOptions) -> int:
    if options.max_completion_tokens is None:
        return DEFAULT_COMPLETION_TOKENS
    return options.max_completion_tokens


def _make_run(options: ModelOptions) -> LanguageModelRun:
    """Return the run whose settings the evaluation uses, with a checked environment.

    Raises:
        UserError: the environment, its options or an override is wrong.
    """
    environment, max_concurrent = _make_environment(options)
    generator = options.generator or GENERATORS[0]
    num_concurrent = min(max_concurrent, _MAX_CONCURRENT[generator])
    tree: dict[str, Any] = {
        "name": "evaluation",
        "seed": options.seed,
        "model": {"kind": "pretrained", "path": options.models[0]},
        "environment": environment,
        "generator": {"kind": generator},
        "rollout": {
            "group_size": 2,
            "num_groups_in_flight": max(1, num_concurrent // 2),
            "num_threads": _count_threads(),
            "max_completion_tokens": _get_completion_tokens(options),
            "max_tokens": max(MAX_TOKENS, 2 * _get_completion_tokens(options)),
            "group_timeout_s": _EPISODE_TIMEOUT_S,
        },
        # The sampling settings of an evaluation may differ from those of a training.
        "algorithm": {"correction": {"kind": "off"}, "old_logprobs": "recompute"},
        "training": {"idle_timeout_s": _NO_TIMEOUT_S},
        "eval": {
            "num_games": options.num_episodes,
            "max_games_per_task": None,
            "temperature": options.temperature,
            "seed": FIRST_EVAL_SEED + options.seed * MAX_EPISODES,
            "timeout_s": _NO_TIMEOUT_S,
        },
    }
    run = make_run_config(tree, options.overrides, source="the evaluation")
    if not isinstance(run, LanguageModelRun):
        raise ConfigError("an evaluation of models cannot have another kind; remove --set kind")
    return run


def _make_environment(options: ModelOptions) -> tuple[dict[str, Any], int]:
    """Return the environment's section, and its maximum number of concurrent sessions.

    Raises:
        UserError: a package, game or option does not exist.
    """
    location, constructor_options = options.target or "", parse_options(options.options)
    require_options_only_for_targets(location, constructor_options)
    section: dict[str, Any] = {"tools": options.uses_tools}
    if "://" in location:
        return section | {"kind": "remote", "address": location}, max(_MAX_CONCURRENT.values())
    factory = environment_factory(location, constructor_options)
    factory().close()
    section |= {"package": location, "options": constructor_options}
    if factory.one_per_process:
        return section | {"max_sessions": MAX_PROCESSES}, MAX_PROCESSES
    return section, max(_MAX_CONCURRENT.values())


def _count_threads() -> int:
    """Return OMP_NUM_THREADS if it is set, otherwise the number of CPUs that may be used."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return count_available_cpus()


def _make_result(
    rows: CollectedRows, run: LanguageModelRun, options: ModelOptions, *, is_finished: bool
) -> ModelEvaluation | None:
    """Return the result so far, or None if no episode of a model is valid yet."""
    plan = rows.plan
    if plan is None or not any(has_valid(rows.select_outcomes(name)) for name in plan.models):
        return None
    return make_evaluation(
        rows,
        plan,
        run,
        seed=options.seed,
        endpoint=options.endpoint,
        is_finished=is_finished,
    )


def _show(evaluation: ModelEvaluation, options: ModelOptions) -> None:
    """Print the result, and write the files that were requested."""
    console = get_stdout()
    for table in make_model_tables(evaluation):
        console.print(table)
    if options.json_path is not None:
        content = evaluation.model_dump_json(indent=2) + "\n"
        write_atomically(options.json_path, content, option="--json")
        print_line(console, f"every completion  {options.json_path}")
    if options.report_path is not None:
        write_evaluation_report(evaluation, options.report_path)
        print_line(console, f"report            {options.report_path}")


def _advise_after_stop(evaluation: ModelEvaluation | None) -> str:
    if evaluation is None:
        return "no episode of a model has ended yet"
    num_done = sum(model.result.num_games for model in evaluation.models.values())
    return f"the result above is that of the {num_done:,} episodes of models so far"


class _ProgressView:
    """The rows of the trainer, and a status line about them."""

    def __init__(self, path: Path) -> None:
        self.rows = CollectedRows()
        self._follower = RecordsFollower(path, EvaluationRow)
        self._console = get_stderr()
        self._shown_progress = ""
        self._shown_at_s = 0.0
        self._policy = ""
        self._policy_started_at_s = 0.0

    def refresh(self, status: Status) -> None:
        """Read new rows, and show the progress."""
        self.rows.add(self._follower.read_new())
        progress, remaining = self._describe()
        line = clean_for_terminal(f"{progress}{remaining}")
        status.update(Text(line))
        is_due = time.monotonic() - self._shown_at_s >= PLAIN_INTERVAL_S
        if not self._console.is_terminal and is_due and progress not in ("", self._shown_progress):
            self._shown_progress, self._shown_at_s = progress, time.monotonic()
            print_line(self._console, line)

    def _describe(self) -> tuple[str, str]:
        """Return the progress of the current policy, and its remaining time."""
        plan, policy = self.rows.plan, self.rows.newest_policy
        if plan is None or not policy or policy not in self.rows.activity:
            return self.rows.activity or "checking the models", ""
        if policy != self._policy:
            self._policy, self._policy_started_at_s = policy, time.monotonic()
        outcomes = self.rows.select_outcomes(policy)
        progress = f"{policy}  {len(outcomes):,}/{plan.num_episodes:,} episodes"
        if has_valid(outcomes):
            progress += f"  {_describe_result(summarize(outcomes), plan.is_game)}"
        elapsed_s = time.monotonic() - self._policy_started_at_s
        remaining_s = elapsed_s / len(outcomes) * (plan.num_episodes - len(outcomes))
        return progress, f"  {format_duration(remaining_s)} left" if remaining_s > 1 else ""


def _describe_result(result: PolicyResult, is_game: bool) -> str:
    """Return the share of successes, or the mean return if it is unknown, with its interval."""
    if result.win_rate is not None:
        interval = format_percent_interval(result.win_rate_ci95)
        success = choose_wording(is_game).success
        return f"{success} {format_percent(result.win_rate)} ({interval})"
    interval = format_fixed_interval(result.expected_return_ci95)
    return f"return {format_fixed(result.expected_return, 3)} ({interval})"
