"""Callbacks of a script, and the report to Trackio."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from transformers import TrainerCallback

from ludus.trainer.compat.trl import GRPOConfig, GRPOTrainer, RichProgressCallback
from ludus.trainer.compat.trl.callbacks import Callbacks
from ludus.trainer.compat.trl.history import TrainerState

ENTRY = {"loss": 0.5, "reward": 2.0, "epoch": 1.0, "step": 3}
EVALUATION = {"eval_reward": 4.0, "epoch": 1.0, "step": 3}
WORDS = ["a", "b", "c"]


class Recorder(TrainerCallback):
    """A callback that records its events and stops at the second step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("step", state.global_step))
        control.should_training_stop = state.global_step >= 2

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.events.append(("log", len(logs)))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.events.append(("evaluate", metrics["eval_reward"]))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do nothing."""


class FakeTrackio:
    """The functions of the package trackio that a run calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **arguments: Any) -> None:
        self.calls.append(("init", arguments))

    def log(self, values: Any) -> None:
        self.calls.append(("log", values))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def score_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_each_entry_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    recorder, state = Recorder(), TrainerState(global_step=1, max_steps=3)
    callbacks = Callbacks([recorder, RichProgressCallback], GRPOConfig(), state)
    assert "note: Recorder is never called for on_save" in capsys.readouterr().err
    state.log_history.append(ENTRY)
    callbacks.report_entries()
    state.log_history.append(EVALUATION)
    callbacks.report_entries()
    callbacks.report_entries()
    assert recorder.events == [("log", 3), ("evaluate", 4.0), ("log", 2)]
    assert "step 1 of 3: loss 0.5, reward 2, epoch 1\n" in capsys.readouterr().err


def test_trackio_gets_the_entries_under_the_names_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trackio, state = FakeTrackio(), TrainerState(global_step=3)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    args = GRPOConfig("out/wordle", report_to="trackio", trackio_space_id="me/space")
    callbacks = Callbacks(None, args, state)
    callbacks.call("on_train_begin")
    state.log_history += [ENTRY, EVALUATION]
    callbacks.report_entries()
    callbacks.call("on_train_end")
    (_, run), (_, values), (_, evaluation), (last, _) = trackio.calls
    names = (run["project"], run["name"], run["space_id"], run["config"]["report_to"])
    assert names == ("huggingface", "wordle", "me/space", "trackio")
    assert (values["train/reward"], values["train/global_step"]) == (2.0, 3)
    assert (evaluation["eval/reward"], last) == (4.0, "finish")


def test_missing_trackio_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    callbacks = Callbacks(None, GRPOConfig(report_to=["trackio"]), TrainerState())
    assert "trackio is not installed" in capsys.readouterr().err
    callbacks.call("on_train_begin")


@pytest.mark.slow
def test_callbacks_follow_a_training_and_stop_it(tmp_path: Any) -> None:
    recorder = Recorder()
    trainer = GRPOTrainer(
        model={"kind": "tiny", "max_tokens": 64, "warm_start_games": 1, "warm_start_epochs": 1},
        reward_funcs=score_length,
        train_dataset=[{"prompt": f"word {word}"} for word in WORDS],
        args=GRPOConfig(
            str(tmp_path / "run"),
            use_cpu=True,
            max_completion_length=4,
            max_steps=9,
            logging_steps=1,
        ),
        callbacks=[recorder],
        overrides=[f"environment.options.example_answers={json.dumps(WORDS)}"],
    )
    output = trainer.train()
    names = [name for name, _ in recorder.events]
    assert names == ["begin", "step", "log", "step", "log"]
    assert (output.global_step, trainer.summary) == (2, None)
    assert output.metrics["train_runtime"] > 0
