"""Callbacks of a script, and the report to Trackio.

    step of the run --> TrainerState --> on_step_end, on_log, on_evaluate --> should_training_stop?

A callback is a `transformers.TrainerCallback`. The model is in other processes, so callbacks get no
`model`, and events inside an optimizer step do not occur.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.history import TrainerState
from ludus.trainer.compat.trl.run_settings import find_run_folder

_EVENTS = frozenset(
    {
        *("on_init_end", "on_train_begin", "on_train_end"),
        *("on_step_begin", "on_step_end", "on_log", "on_evaluate"),
    }
)
"""Events of a run. Other methods of a callback are never called."""


class RichProgressCallback(TrainerCallback):
    """TRL's progress display: here, a line on stderr for each logged entry."""

    def on_log(
        self,
        args: GRPOConfig,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Write the entry's values to stderr."""
        values = ", ".join(f"{name} {value:.4g}" for name, value in (logs or {}).items())
        sys.stderr.write(f"step {state.global_step} of {state.max_steps}: {values}\n")


class _TrackioReport(TrainerCallback):
    """The logged entries in a Trackio project, with the names that transformers gives them."""

    def __init__(self, trackio: Any) -> None:
        self._trackio = trackio

    def on_train_begin(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Open the run in Trackio."""
        self._trackio.init(
            project=args.project,
            name=args.run_name or find_run_folder(args).name,
            space_id=args.trackio_space_id,
            resume="allow",
            config={name: str(value) for name, value in vars(args).items()},
        )

    def on_log(
        self,
        args: GRPOConfig,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Send the entry's values."""
        values = {
            f"eval/{name.removeprefix('eval_')}" if _is_eval(name) else f"train/{name}": value
            for name, value in (logs or {}).items()
        }
        self._trackio.log(values | {"train/global_step": state.global_step})

    def on_train_end(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Close the run in Trackio."""
        self._trackio.finish()


class Callbacks:
    """The callbacks of a training, called in the order of the script."""

    def __init__(self, callbacks: Any, args: GRPOConfig, state: TrainerState) -> None:
        """Check the callbacks. A class is replaced by its instance, as in transformers.

        Raises:
            ConfigError: one of them is not a callback.
        """
        self._callbacks = [*_read_callbacks(callbacks), *_make_reports(args)]
        self._args = args
        self._state = state
        self._control = TrainerControl()
        self._num_entries = 0
        self.call("on_init_end")

    @property
    def has_stopped(self) -> bool:
        """True after a callback requested that training stops."""
        return bool(self._control.should_training_stop)

    def call(self, event: str, **arguments: Any) -> None:
        """Call all callbacks."""
        for callback in self._callbacks:
            method = getattr(callback, event)
            control = method(self._args, self._state, self._control, model=None, **arguments)
            self._control = control or self._control

    def report_entries(self) -> None:
        """Report the entries of `log_history` that were not reported yet."""
        history = self._state.log_history
        entries, self._num_entries = history[self._num_entries :], len(history)
        for entry in entries:
            logs = {name: value for name, value in entry.items() if name != "step"}
            if any(map(_is_eval, logs)):
                self.call("on_evaluate", metrics=logs)
            self.call("on_log", logs=logs)


def _is_eval(name: str) -> bool:
    return name.startswith("eval_")


def _read_callbacks(callbacks: Any) -> Sequence[TrainerCallback]:
    if callbacks is not None and not isinstance(callbacks, (list, tuple)):
        raise ConfigError(f"callbacks must be a list of callbacks, got {callbacks!r:.80}")
    instances = [
        callback() if inspect.isclass(callback) else callback for callback in callbacks or ()
    ]
    for callback in instances:
        if not isinstance(callback, TrainerCallback):
            raise ConfigError(
                f"callbacks must contain instances of transformers.TrainerCallback, but one is "
                f"{callback!r:.80}; derive it from that class"
            )
        _report_other_events(callback)
    return instances


def _report_other_events(callback: TrainerCallback) -> None:
    names = [
        name
        for name, method in vars(TrainerCallback).items()
        if name.startswith("on_")
        and name not in _EVENTS
        and getattr(type(callback), name) is not method
    ]
    if names:
        sys.stderr.write(
            f"note: {type(callback).__name__} is never called for {', '.join(names)}: the model is "
            "trained in other processes\n"
        )


def _make_reports(args: GRPOConfig) -> Sequence[TrainerCallback]:
    reports = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    if "trackio" not in reports:
        return ()
    try:
        return [_TrackioReport(importlib.import_module("trackio"))]
    except ImportError:
        sys.stderr.write(
            "note: GRPOConfig.report_to = 'trackio', and trackio is not installed: the values are "
            "only in the run folder; install it with `pip install trackio`\n"
        )
        return ()
