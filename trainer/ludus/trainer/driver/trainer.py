"""A run as an object: for notebooks, scripts, and the command line.

    async with Trainer("run.toml") as trainer:
        async for step in trainer.steps():        # training stands still while the body runs
            print(step.number, step.values["reward_mean"])
        print(await trainer.policy.generate("hard 15 vs 10"))
        print(await trainer.evaluate())

It has one folder (`ludus.proto.runs`), and writes there all that `ludus train` does: report,
`ludus watch` and `ludus scale` work on it. Where a configuration names a function, a dictionary
may hold the function itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ludus.proto.config import (
    LanguageModelRun,
    load_run_config,
    require_language_model,
    run_config_from,
)
from ludus.proto.config.changes import Change, describe_changes
from ludus.proto.errors import CheckpointError, ConfigError, UserError
from ludus.proto.runs import CHART_FILE, SUMMARY_FILE, EvalReport, Phase, Resume, Summary
from ludus.trainer.core.functions import name_of
from ludus.trainer.core.tasks import Tasks
from ludus.trainer.driver.build import built, infrastructure_of, resolved
from ludus.trainer.driver.controller import Controller
from ludus.trainer.driver.parts import Parts, Step
from ludus.trainer.driver.policy import Policy
from ludus.trainer.run import control
from ludus.trainer.run.changes import changes_since
from ludus.trainer.run.checkpoint import RunState, check_streams, read_state, starting_point
from ludus.trainer.run.folder import RunFolder, logging_to, path_of
from ludus.trainer.run.schedule import in_steps
from ludus.trainer.run.summary import chart_questions, make_chart, make_summary
from ludus.trainer.setup.environments import chart_prompts, check_names
from ludus.trainer.setup.prepare import check_models

_log = logging.getLogger(__name__)


class Stopped(Exception):
    """The run was ended before its last step; a checkpoint is written."""

    is_wanted = False
    """True where the run's control file said so."""


class Trainer:
    """A run that is started on entry, trained step by step or as a whole, and ended on exit."""

    def __init__(
        self,
        config: LanguageModelRun | Mapping[str, Any] | Path | str | None = None,
        *,
        overrides: Sequence[str] = (),
        resume: Resume | str = Resume.NEVER,
        overwrite: bool = False,
        print_rows: bool = False,
    ) -> None:
        """Take the configuration; nothing is started or written yet.

        Args:
            config: of a run, as an object, a dictionary, or the path of a file; a dictionary may
                hold functions where a file names them, and rewards may be a list of them.
            overrides: each "section.field=value".
            resume: "always" continues from the newest checkpoint; "auto" begins where there is
                none.
            overwrite: replaces the run of that name.
            print_rows: to standard output, too: of a job on a cluster, that is what is seen.

        Raises:
            ConfigError: one line per mistake.
            NotFoundError: there is no such file.
        """
        self.run = resolved(_run_config(config, overrides))
        self._resume = Resume(resume)
        self._overwrite = overwrite
        self._print_rows = print_rows
        self._is_stop_wanted = False
        self._gate = _Gate()
        self._stack = AsyncExitStack()
        self._training: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """The trainer, when environments, learner and workers are there and hold its weights.

        Raises:
            UserError: the run cannot start as configured; it has left nothing behind.
        """
        self._begun_s = time.monotonic()
        check_names(self.run)
        await asyncio.to_thread(check_models, self.run)
        checkpoint = starting_point(self.run, self._resume)
        state = RunState()
        changes: list[Change] = []
        if checkpoint is not None:
            state = read_state(checkpoint)
            check_streams(checkpoint, state)
            changes = changes_since(path_of(self.run), self.run)
        self._folder = self._open_folder(None if checkpoint is None else state.step)
        self.folder = self._folder.path
        try:
            await self._start(checkpoint, state, changes)
        except BaseException as error:
            await self._stack.aclose()
            self._leave_folder(error, is_new=checkpoint is None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the run; one that has not trained its last step leaves a checkpoint."""
        try:
            await self._end_training()
        except BaseException as failure:
            error = error or failure
            raise
        finally:
            if isinstance(error, Stopped):
                _log.info("%s", error)
            elif isinstance(error, Exception):
                _log.error("the run has failed", exc_info=error)
            try:
                await self._stack.aclose()
            finally:
                self._leave_folder(error, is_new=self._state.step == 0)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """The training steps as they are done, until the last one.

        Training stands still while the body of the loop runs, and goes on with the next turn;
        leaving the loop early is no end: another may follow.

        Raises:
            LudusError: what ended the run.
        """
        while (step := await self._gate.next(self._task)) is not None:
            yield step

    async def train(self) -> Summary:
        """What the run came to, once it has trained its last step; see also `evaluate`.

        Raises:
            Stopped: `stop` was called, or the run's control file said so.
            LudusError: what ended the run.
        """
        self._gate.open()
        self._gate.has_told_the_end = True
        await self._task
        if not self._controller.finished:
            stopped = Stopped(f"stopped after step {self._state.step}")
            stopped.is_wanted = self._is_stop_wanted
            raise stopped
        return await self._finish()

    def stop(self) -> None:
        """End training after the step it is in, with a checkpoint."""
        self._controller.stop()

    @property
    def is_stopping(self) -> bool:
        """True once `stop` was called."""
        return self._controller.is_stopping

    @property
    def is_trained(self) -> bool:
        """True once the last step is trained."""
        return self._task.done() and self._controller.finished

    @property
    def num_steps_trained(self) -> int:
        """Steps trained so far, those before a checkpoint that the run continues from included."""
        return self._state.step

    @property
    def policy(self) -> Policy:
        """The policy with its newest weights, where training stands still; else, nearly."""
        parts = self._parts
        return Policy(self.run, parts.workers, parts.chat, self._controller.settled)

    async def evaluate(self, num_games: int | None = None) -> dict[str, EvalReport]:
        """By environment: the policy as it is now, beside the fixed policies on the same seeds.

        Args:
            num_games: in each; None is eval.num_games, and the fixed policies have played no more.

        Raises:
            ConfigError: more games than those.
        """
        config = self.run.eval
        most = max(config.num_games, config.num_games_during)
        wanted = config.num_games if num_games is None else num_games
        if not 1 <= wanted <= most:
            raise ConfigError(
                f"num_games expected 1 to {most}, as many as the fixed policies have played, got "
                f"{wanted}; raise eval.num_games"
            )
        await self._controller.settled()
        return await self._parts.evaluator.judge(wanted)

    async def save(self) -> Path:
        """The folder of a checkpoint of now; to be called where training stands still.

        Raises:
            CheckpointError: it is under way.
        """
        if not self._gate.is_closed and not self._task.done():
            raise CheckpointError(
                "expected training to stand still, as it does between `steps`, got a run under "
                "way; it writes a checkpoint every training.checkpoint_every_steps steps"
            )
        if not self._task.done():
            await self._controller.save_checkpoint()
        return self._parts.checkpoints.newest_first()[0]

    @property
    def _task(self) -> asyncio.Task[None]:
        if self._training is None:
            raise UserError("expected `async with Trainer(...) as trainer`, got one not entered")
        return self._training

    def _open_folder(self, step: int | None) -> RunFolder:
        if step is not None:
            return RunFolder.reopen(self.run, step)
        # What a run that died before its first checkpoint has left is of no use.
        is_repeated = self._resume is Resume.AUTO
        return RunFolder.create(self.run, overwrite=self._overwrite or is_repeated)

    async def _start(self, checkpoint: Path | None, state: RunState, changes: list[Change]) -> None:
        folder, enter = self._folder, self._stack.enter_async_context
        self._stack.enter_context(logging_to(folder.path, self.run.log_level))
        if changes:
            told = f"the run continues with another configuration: {describe_changes(changes)}"
            _log.warning("%s", told)
            sys.stderr.write(f"warning: {told}\n")
        folder.open_sinks(in_job_log=self._print_rows)
        folder.phase(Phase.START_ENVIRONMENT)
        self._infrastructure = await enter(infrastructure_of(self.run, folder.path))
        self.run = in_steps(self.run, self._infrastructure.num_tasks)
        folder.lasts(self.run)
        self._parts = await enter(built(self.run, folder, self._infrastructure, checkpoint))
        self._state = state
        self._controller = Controller(self._parts, state, self._gate.pass_through)
        self._training = asyncio.create_task(self._train())
        self._stack.push_async_callback(self._cancel_training)
        await self._gate.reached(self._training)

    async def _train(self) -> None:
        """Run the controller, and do on the way what the run's control file says."""
        async with Tasks() as tasks:
            tasks.start(
                control.follow(self.folder, self._parts.workers.resize, self._stop_as_wanted)
            )
            await self._controller.run()

    def _stop_as_wanted(self) -> None:
        self._is_stop_wanted = True
        self._controller.stop()

    async def _end_training(self) -> None:
        """Let training end with a checkpoint; raise what it failed of, unless that was told."""
        if self._task.done() and self._gate.has_told_the_end:
            return
        self._gate.has_told_the_end = True
        self._controller.stop()
        self._gate.open()
        await self._task

    async def _cancel_training(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    def _leave_folder(self, error: BaseException | None, *, is_new: bool) -> None:
        if is_new and isinstance(error, UserError):
            # It could not start as configured, so there is nothing to keep.
            self._folder.discard()
        self._folder.close()

    async def _finish(self) -> Summary:
        """The summary; it is written beside the final evaluation and the chart."""
        run, folder, state = self.run, self._folder, self._state
        folder.phase(Phase.EVALUATE, state.step)
        reports = await self._parts.evaluator.judge(run.eval.num_games)
        for name, report in reports.items():
            folder.evaluated(state.step, state.games_trained, name, report)
        summary = make_summary(
            run,
            state,
            reports,
            {name: one.description for name, one in self._infrastructure.environments.items()},
            training_s=folder.elapsed_s,
            total_s=time.monotonic() - self._begun_s,
        )
        folder.record(SUMMARY_FILE, summary)
        await _write_chart(self._parts)
        folder.phase(Phase.DONE, state.step)
        return summary


class _Gate:
    """Between a training loop and the program that iterates over its steps.

    training loop  --step--> waits here ... until the program wants another one, or lets all pass
    """

    def __init__(self) -> None:
        self._wanted = asyncio.Event()
        self._steps: asyncio.Queue[Step | None] = asyncio.Queue()
        self._is_open = False
        self.is_closed = False
        """True while the training loop waits here."""
        self.has_told_the_end = False
        """Whether the program was told how training has ended."""

    def open(self) -> None:
        """Let everything pass from now on."""
        self._is_open = True
        self._let_on()

    async def pass_through(self, step: Step | None) -> None:
        """Wait, in the training loop, until another step is wanted."""
        if self._is_open:
            return
        self._steps.put_nowait(step)
        self.is_closed = True
        await self._wanted.wait()
        self._wanted.clear()

    async def reached(self, training: asyncio.Task[None]) -> Step | None:
        """What the training loop brings here next; None before the first step, and at the end."""
        brought = asyncio.ensure_future(self._steps.get())
        try:
            await asyncio.wait([brought, training], return_when=asyncio.FIRST_COMPLETED)
            if brought.done():
                return brought.result()
        finally:
            brought.cancel()
        self.has_told_the_end = True
        await training
        return None

    async def next(self, training: asyncio.Task[None]) -> Step | None:
        """The next step; None when there is none."""
        self._let_on()
        return await self.reached(training)

    def _let_on(self) -> None:
        # Now, and not when the loop wakes up: nobody may take it for standing still in between.
        self.is_closed = False
        self._wanted.set()


def _run_config(
    config: LanguageModelRun | Mapping[str, Any] | Path | str | None, overrides: Sequence[str]
) -> LanguageModelRun:
    if isinstance(config, LanguageModelRun):
        if not overrides:
            return config
        run = run_config_from(config.model_dump(mode="json"), overrides)
    elif isinstance(config, Mapping):
        run = run_config_from(_named(config), overrides)
    else:
        run = load_run_config(None if config is None else Path(config), overrides)
    return require_language_model(run, "Trainer")


def _named(value: Any, key: str = "") -> Any:
    """A configuration that holds functions, with their paths in their places."""
    if isinstance(value, Mapping):
        return {name: _named(one, name) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named(_reward_term(one) if key == "rewards" else one) for one in value]
    return name_of(value) if callable(value) else value


def _reward_term(value: Any) -> Any:
    """A term, by the name that its function has here: that of its path may carry a number."""
    term = {"function": value} if callable(value) else value
    if not isinstance(term, Mapping) or not callable(term.get("function")):
        return term
    own_name = getattr(term["function"], "__name__", None)
    return {**({"name": own_name} if own_name else {}), **term}


async def _write_chart(parts: Parts) -> None:
    """Write the chart of the first environment that has prompts for one, if they can be made."""
    try:
        found = chart_prompts(parts.run)
    except ConfigError as error:  # they could be made when the run began
        _log.warning("the run has no chart: %s", error)
        return
    if found is not None:
        name, prompts = found
        logprobs = await parts.learners.score_completions(chart_questions(prompts, parts.chat))
        parts.folder.record(CHART_FILE, make_chart(name, prompts, logprobs))
