"""A language-model run as an object, for notebooks, scripts and the command line.

    async with Trainer("run.toml") as trainer:
        async for step in trainer.steps():        # training pauses while the body runs
            print(step.number, step.values.get("reward_mean"))
        print(await trainer.policy.generate("hard 15 vs 10"))
        print(await trainer.evaluate())

The run has a folder (`ludus.proto.runs`) with the same files as a run of `ludus train`, so that the
report, `ludus watch` and `ludus scale` work with it. A configuration that is a dictionary may
contain functions instead of their names.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ludus.proto.config import (
    LanguageModelRun,
    load_run_config,
    make_run_config,
    require_language_model,
)
from ludus.proto.errors import CheckpointError, ConfigError, UserError
from ludus.proto.runs import (
    CHART_FILE,
    CONFIG_FILE,
    EvalReport,
    Phase,
    Resume,
    Summary,
    read_metrics,
)
from ludus.trainer.actors.cpu_threads import resolve_num_threads
from ludus.trainer.core.functions import get_or_register_path
from ludus.trainer.core.stopping import RunStopped, StopRequest
from ludus.trainer.core.tasks import CancellingTaskGroup
from ludus.trainer.driver.build import start_components, start_infrastructure
from ludus.trainer.driver.checks import (
    check_importable_names,
    check_models,
    resolve_config,
    resolve_memory,
)
from ludus.trainer.driver.invalid_actions import resolve_invalid_action_rewards
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.driver.loops.steps import Step, StepGate
from ludus.trainer.driver.policy import Policy
from ludus.trainer.driver.policy_chart import make_policy_chart
from ludus.trainer.run.checkpoint import RunState
from ludus.trainer.run.columns import MetricColumns, make_columns
from ludus.trainer.run.lifecycle import apply_control_files, open_run
from ludus.trainer.run.metrics_writer import MetricsWriter
from ludus.trainer.run.schedule import resolve_num_steps
from ludus.trainer.run.summary import write_summary

_log = logging.getLogger(__name__)


class Trainer:
    """A run that starts on entry, trains one step at a time or to the end, and stops on exit."""

    def __init__(
        self,
        config: LanguageModelRun | Mapping[str, Any] | Path | str | None = None,
        *,
        overrides: Sequence[str] = (),
        resume: Resume | str = Resume.NEVER,
        overwrite: bool = False,
        print_rows: bool = False,
    ) -> None:
        """Read the configuration; nothing is started or written.

        Args:
            config: configuration of the run: an object, a dictionary, or the path of a file. A
                dictionary may contain functions instead of their names, and a list of functions as
                rewards.
            overrides: overrides of the form "section.field=value".
            resume: "always" continues from the latest checkpoint; "auto" starts a new run if there
                is no checkpoint.
            overwrite: whether to replace an existing run of the same name.
            print_rows: whether to also print each row of metrics.

        Raises:
            ConfigError: the configuration is invalid; the message has one line per mistake.
            NotFoundError: there is no such file.
        """
        self.run = resolve_config(_load_config(config, overrides))
        self.stop_request = StopRequest(self.run.training.stop_grace_s)
        self._resume = Resume(resume)
        self._overwrite = overwrite
        self._print_rows = print_rows
        self._gate = StepGate()
        self._exit_stack = AsyncExitStack()
        self._training_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start environments, learner and workers, and return the trainer.

        Raises:
            UserError: the run cannot start as configured. Everything that was started is stopped.
        """
        self._start_s = time.monotonic()
        check_importable_names(self.run)
        await asyncio.to_thread(check_models, self.run)
        self.run = resolve_num_threads(self.run)
        self.run, _ = await asyncio.to_thread(resolve_memory, self.run)
        async with AsyncExitStack() as stack:
            opened_run = open_run(
                self.run,
                RunState,
                self.run.training.keep_checkpoints,
                resume=self._resume,
                overwrite=self._overwrite,
            )
            self._storage = stack.enter_context(opened_run)
            self.folder = self.run.folder
            await self._start(stack)
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the run, with a checkpoint if its last step was not trained."""
        try:
            await self._end_training()
        except BaseException as failure:
            error = error or failure
            raise
        finally:
            if isinstance(error, RunStopped):
                _log.info("%s", error)
            elif isinstance(error, Exception):
                _log.error("the run failed", exc_info=error)
            await self._exit_stack.__aexit__(type(error) if error else None, error, None)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield each training step until the last step is trained.

        Training pauses while the body of the loop runs. If a loop stops early, a later loop
        continues with the next step.

        Raises:
            LudusError: the reason why the run failed.
        """
        while (step := await self._gate.request_next(self._started_task)) is not None:
            yield step

    async def train(self) -> Summary:
        """Train to the last step, evaluate the policy, and return the summary.

        Raises:
            RunStopped: `stop` was called, or the run's control file requested a stop.
            LudusError: the reason why the run failed.
        """
        self._gate.open()
        self._gate.has_reported_end = True
        await self._started_task
        if not self._controller.is_finished:
            step, is_abandoned = self._state.step, self._controller.is_step_abandoned
            abandonment = f"; step {step + 1} was abandoned, and is trained again"
            raise RunStopped(
                f"stopped after step {step}{abandonment if is_abandoned else ''}",
                is_from_control_file=self.stop_request.is_from_control_file,
            )
        # Training is over, so that the next signal interrupts the evaluation at once.
        self.stop_request.hurry()
        return await self._write_results()

    def stop(self) -> None:
        """Request that training stops after its current step, with a checkpoint."""
        self.stop_request.set()

    @property
    def num_steps_trained(self) -> int:
        """Number of steps trained so far, including the steps before a resume."""
        return self._state.step

    @property
    def policy(self) -> Policy:
        """The current policy. While training pauses, it has the newest weights."""
        workers, tokenizer = self.components.workers, self.components.tokenizer
        return Policy(self.run, workers, tokenizer, self._controller.wait_for_delivery)

    @property
    def metrics(self) -> MetricColumns:
        """Values of the training steps so far: a list by metric (docs/metrics.md), and the steps.

        The lists have one length, so `pandas.DataFrame(trainer.metrics)` has a row per step. Steps
        before a resume are included.
        """
        return make_columns(read_metrics(self.run.folder), "train")

    @property
    def evaluations(self) -> MetricColumns:
        """Results of the evaluations so far, as `metrics`: a row per evaluation and environment."""
        return make_columns(read_metrics(self.run.folder), "eval")

    async def evaluate(self, num_games: int | None = None) -> dict[str, EvalReport]:
        """Evaluate the current policy on the seeds of the fixed policies; return the reports.

        Args:
            num_games: number of episodes in each environment, at most the number that the fixed
                policies have played. Default: eval.num_games.

        Raises:
            ConfigError: `num_games` is out of range.
        """
        config = self.run.eval
        max_games = max(config.num_games, config.num_games_during)
        num_games = config.num_games if num_games is None else num_games
        if not 1 <= num_games <= max_games:
            raise ConfigError(
                f"num_games must be from 1 to {max_games}, the number of episodes of the fixed "
                f"policies, got {num_games}; raise eval.num_games"
            )
        await self._controller.wait_for_delivery()
        return await self.components.evaluator.evaluate(num_games)

    async def save(self) -> Path:
        """Write a checkpoint and return its folder; call it while training pauses.

        Raises:
            CheckpointError: training is running.
        """
        if not self._gate.is_waiting and not self._started_task.done():
            raise CheckpointError(
                "cannot save while training runs; call save in the body of a loop over `steps`, or "
                "set training.checkpoint_every_steps"
            )
        if not self._started_task.done():
            await self._controller.save_checkpoint()
        return self.components.checkpoints.list_newest_first()[0]

    @property
    def _started_task(self) -> asyncio.Task[None]:
        if self._training_task is None:
            raise UserError("the trainer has not started; use `async with Trainer(...) as trainer`")
        return self._training_task

    @property
    def _state(self) -> RunState:
        return self._storage.state

    async def _start(self, stack: AsyncExitStack) -> None:
        storage = self._storage
        self._metrics = MetricsWriter(
            self.run,
            self.folder,
            resume_from=None if storage.checkpoint is None else storage.state.step,
            job_log=sys.stdout if self._print_rows else None,
        )
        stack.enter_context(closing(self._metrics))
        self._metrics.log_phase(Phase.START_ENVIRONMENT)
        self._infrastructure = await stack.enter_async_context(
            start_infrastructure(self.run, self.folder)
        )
        self.run = resolve_num_steps(self.run, self._infrastructure.num_tasks)
        return_ranges = self._infrastructure.return_ranges
        self.run = resolve_invalid_action_rewards(self.run, return_ranges)
        self._metrics.num_steps = self.run.training.num_steps
        if storage.checkpoint is None:
            storage.folder.write(CONFIG_FILE, self.run)
        self.components = await stack.enter_async_context(
            start_components(self.run, storage, self._metrics, self._infrastructure)
        )
        self._controller = Controller(self.components, storage.state, self.stop_request, self._gate)
        self._training_task = asyncio.create_task(self._train())
        stack.push_async_callback(self._cancel_training)
        await self._gate.receive(self._training_task)

    async def _train(self) -> None:
        """Run the controller, and apply changes of the run's control file."""
        async with CancellingTaskGroup() as tasks:
            resize = self.components.workers.resize
            tasks.start(apply_control_files(self.folder, resize, self.stop_request))
            await self._controller.run()

    async def _end_training(self) -> None:
        """Stop training with a checkpoint, and raise its failure unless it was already raised."""
        if self._started_task.done() and self._gate.has_reported_end:
            return
        self._gate.has_reported_end = True
        self.stop_request.set()
        self._gate.open()
        await self._started_task

    async def _cancel_training(self) -> None:
        self._started_task.cancel()
        await asyncio.wait([self._started_task])

    async def _write_results(self) -> Summary:
        """Write the final evaluation, the summary and the chart; return the summary."""
        run, state, metrics, components = self.run, self._state, self._metrics, self.components
        metrics.log_phase(Phase.EVALUATE, state.step)
        reports = await components.evaluator.evaluate(run.eval.num_games)
        metrics.log_samples(state.step, await components.evaluator.play_samples())
        summary = write_summary(
            run,
            self._storage,
            metrics,
            {
                name: (environment.description.name, environment.description.options)
                for name, environment in self._infrastructure.environments.items()
            },
            reports,
            state.summary_counts,
            generator=run.generator.kind,
            total_s=time.monotonic() - self._start_s,
            num_learner_ranks=run.learner.num_ranks,
            num_rollout_workers=run.rollout.num_workers,
        )
        score = components.learners.score_completions
        try:
            chart = await make_policy_chart(run, components.tokenizer, score)
            if chart is not None:
                self._storage.folder.write(CHART_FILE, chart)
        except ConfigError as error:  # possible although the function worked at the start
            _log.warning("the run has no chart: %s", error)
        metrics.log_phase(Phase.DONE, state.step)
        return summary


def _load_config(
    config: LanguageModelRun | Mapping[str, Any] | Path | str | None, overrides: Sequence[str]
) -> LanguageModelRun:
    if isinstance(config, LanguageModelRun):
        if not overrides:
            return config
        run = make_run_config(config.model_dump(mode="json"), overrides)
    elif isinstance(config, Mapping):
        run = make_run_config(_replace_functions(config), overrides)
    else:
        run = load_run_config(None if config is None else Path(config), overrides)
    return require_language_model(run, "Trainer")


def _replace_functions(setting: Any, key: str = "") -> Any:
    """Replace the functions in a configuration with their import paths."""
    if isinstance(setting, Mapping):
        return {name: _replace_functions(entry, name) for name, entry in setting.items()}
    if isinstance(setting, (list, tuple)):
        entries = map(_name_reward_term, setting) if key == "rewards" else setting
        return list(map(_replace_functions, entries))
    return get_or_register_path(setting) if callable(setting) else setting


def _name_reward_term(setting: Any) -> Any:
    """Set the name of a reward term to the name of its function.

    The default name, from the function's path, may contain a number.
    """
    term = {"function": setting} if callable(setting) else setting
    if not isinstance(term, Mapping) or not callable(term.get("function")):
        return term
    function_name = getattr(term["function"], "__name__", None)
    return {**({"name": function_name} if function_name else {}), **term}
