"""A run as an object, for programs without async: scripts, and cells of notebooks.

    with SyncTrainer("run.toml") as trainer:
        for step in trainer.steps():              # training pauses while the body runs
            print(step.number, step.values.get("reward_mean"))
        print(trainer.generate("hard 15 vs 10"))

The event loop of the run is in a separate thread, so that it also works while a notebook's event
loop is running.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from tqdm.auto import tqdm

from ludus.env import Message
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import UserError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import EvalReport, Resume, Summary
from ludus.proto.wording import choose_wording
from ludus.trainer.driver.loops.steps import Step
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.run.columns import MetricColumns

ResultT = TypeVar("ResultT")

_NUM_INTERRUPTS_TO_CANCEL = 3
"""Number of Ctrl-C during the end of a run after which it ends without a checkpoint."""


class SyncTrainer:
    """A `Trainer` whose methods wait for their results. It shows a progress bar while it trains.

    Ctrl-C raises KeyboardInterrupt in the waiting method. On exit, the run stops after its current
    step and writes a checkpoint. Another Ctrl-C during that time abandons the step, and a third
    gives up the checkpoint.
    """

    def __init__(
        self,
        config: LanguageModelRun | Mapping[str, Any] | Path | str | None = None,
        *,
        overrides: Sequence[str] = (),
        resume: Resume | str = Resume.NEVER,
        overwrite: bool = False,
        shows_progress: bool = True,
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
            shows_progress: whether to show a progress bar.

        Raises:
            ConfigError: the configuration is invalid; the message has one line per mistake.
            NotFoundError: there is no such file.
        """
        self._trainer = Trainer(config, overrides=overrides, resume=resume, overwrite=overwrite)
        self._shows_progress = shows_progress
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        """Start environments, learner and workers, and return the trainer.

        Raises:
            UserError: the run cannot start as configured. Everything that was started is stopped.
        """
        loop: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=_run_loop, args=(loop,), name="training", daemon=True
        )
        self._thread.start()
        self._loop = loop.result()
        try:
            self._wait(self._trainer.__aenter__())
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the run, with a checkpoint if its last step was not trained.

        Raises:
            KeyboardInterrupt: Ctrl-C, which abandons the step; from the third on, nothing is saved.
        """
        call = self._make_call(self._trainer.__aexit__(error_type, error, traceback))
        num_interrupts = 0
        try:
            while not call.future.done():
                try:
                    call.begin()
                    wait([call.future])
                except KeyboardInterrupt:
                    num_interrupts += 1
                    if num_interrupts < _NUM_INTERRUPTS_TO_CANCEL:
                        self._trainer.stop_request.hurry()
                    else:
                        call.cancel()
            if num_interrupts and error_type is None:
                raise KeyboardInterrupt
            call.future.result()
        finally:
            self._stop_loop()

    @property
    def run(self) -> LanguageModelRun:
        """The resolved configuration."""
        return self._trainer.run

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self._trainer.run.folder

    @property
    def metrics(self) -> MetricColumns:
        """Values of the training steps so far, by metric; see `Trainer.metrics`."""
        return self._trainer.metrics

    @property
    def evaluations(self) -> MetricColumns:
        """Results of the evaluations so far, by metric; see `Trainer.evaluations`."""
        return self._trainer.evaluations

    def steps(self) -> Iterator[Step]:
        """Yield each training step until the last step is trained.

        Training pauses while the body of the loop runs. If a loop stops early, a later loop
        continues with the next step.

        Raises:
            LudusError: the reason why the run failed.
        """
        self._get_loop()
        steps = self._trainer.steps()
        results: dict[str, str] = {}
        try:
            with self._show_progress() as progress:
                while (step := self._wait(_get_next(steps))) is not None:
                    results |= _list_results(step)
                    progress.set_postfix(results, refresh=False)
                    progress.update(step.number - progress.n)
                    yield step
        finally:
            if self._loop is not None:
                self._wait(steps.aclose())

    def train(self) -> Summary:
        """Train to the last step, evaluate the policy, and return the summary.

        Raises:
            RunStopped: the run's control file requested a stop.
            LudusError: the reason why the run failed.
        """
        for _ in self.steps():
            pass
        return self._wait(self._trainer.train())

    def evaluate(self, num_games: int | None = None) -> dict[str, EvalReport]:
        """Evaluate the current policy; see `Trainer.evaluate`."""
        return self._wait(self._trainer.evaluate(num_games))

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        num: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Return completions of the current policy; see `Policy.generate`."""
        self._get_loop()
        return self._wait(
            self._trainer.policy.generate(
                prompt, num=num, temperature=temperature, max_tokens=max_tokens, seed=seed
            )
        )

    def save(self) -> Path:
        """Write a checkpoint and return its folder; see `Trainer.save`."""
        return self._wait(self._trainer.save())

    def _show_progress(self) -> Any:
        return tqdm(
            total=self.run.training.num_steps,
            initial=self._trainer.num_steps_trained,
            desc=self.run.name,
            unit="step",
            disable=not self._shows_progress,
        )

    def _wait(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of a coroutine. Ctrl-C cancels it; its end is awaited in any case."""
        call = self._make_call(coroutine)
        is_interrupted = False
        while not call.future.done():
            try:
                call.begin()
                wait([call.future])
            except KeyboardInterrupt:
                is_interrupted = True
                call.cancel()
        if is_interrupted:
            raise KeyboardInterrupt
        return call.future.result()

    def _make_call(self, coroutine: Coroutine[Any, Any, ResultT]) -> _Call[ResultT]:
        try:
            return _Call(coroutine, self._get_loop())
        except UserError:
            coroutine.close()
            raise

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the run.

        Raises:
            UserError: the run has not started, or has ended.
        """
        if self._loop is None:
            raise UserError("the trainer is not running; use `with SyncTrainer(...) as trainer`")
        return self._loop

    def _stop_loop(self) -> None:
        loop, self._loop = self._get_loop(), None
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()


class _Call(Generic[ResultT]):
    """A coroutine in the event loop of another thread.

    Ctrl-C may interrupt any method, so `begin` may be called again.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, ResultT], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._coroutine = coroutine
        self._loop = loop
        self._task: asyncio.Task[ResultT] | None = None
        self._is_cancelled = False
        self.future: Future[ResultT] = Future()
        """Result, which is there when the coroutine has ended, also after `cancel`."""

    def begin(self) -> None:
        """Start the coroutine, unless it has started."""
        self._loop.call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        """Cancel the coroutine."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        if self._task is None:
            self._task = self._loop.create_task(self._coroutine)
            self._task.add_done_callback(self._end)
            if self._is_cancelled:
                self._task.cancel()

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[ResultT]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _run_loop(started: Future[asyncio.AbstractEventLoop]) -> None:
    """Run an event loop until it is stopped, then cancel what remains and close it."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        started.set_result(loop)
        loop.run_forever()


async def _get_next(steps: AsyncGenerator[Step, None]) -> Step | None:
    return await anext(steps, None)


def _list_results(step: Step) -> dict[str, str]:
    """Return the results to show next to the progress bar."""
    reward = step.values.get(TrainMetric.REWARD_MEAN)
    results = {} if reward is None else {"reward": f"{reward:.3f}"}
    for report in (step.evaluation or {}).values():
        win_rate, mean = report.policy.win_rate, report.policy.expected_return
        success = choose_wording(report.is_game).success
        results["evaluation"] = f"{mean:.3f}" if win_rate is None else f"{win_rate:.1%} {success}"
    return results


def train(
    config: LanguageModelRun | Mapping[str, Any] | Path | str | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: Resume | str = Resume.NEVER,
    overwrite: bool = False,
    shows_progress: bool = True,
) -> Summary:
    """Train a run to its last step, and return its summary; see `SyncTrainer`.

    Raises:
        UserError: the run cannot start as configured.
        LudusError: the reason why the run failed.
    """
    trainer = SyncTrainer(
        config,
        overrides=overrides,
        resume=resume,
        overwrite=overwrite,
        shows_progress=shows_progress,
    )
    with trainer:
        return trainer.train()
