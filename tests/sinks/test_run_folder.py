"""Tests of the run folder and of the metrics and transcripts in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from ludus.env.evaluation import EpisodeOutcome, summarize
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.metrics import EvalMetric, TrainMetric
from ludus.proto.runs import (
    LOG_ROW_PREFIX,
    EvalReport,
    MetricsRow,
    Phase,
    read_metrics,
    read_traces,
    read_transcripts,
)
from ludus.trainer.driver.loops.step_values import StepTimes, make_trace
from ludus.trainer.run import lifecycle
from ludus.trainer.run.lifecycle import RunFolder, ensure_run_id
from ludus.trainer.run.metrics_writer import MetricsWriter
from ludus.trainer.weights.canary import CanaryReport, WorkerWeights
from tests.report.synthetic_run import transcript


def make_config(output_dir: Path, **metrics: object) -> LanguageModelRun:
    return LanguageModelRun.model_validate(
        {"name": "demo", "output_dir": str(output_dir), "metrics": metrics}
    )


@contextmanager
def open_metrics(
    run: LanguageModelRun, resume_from: int | None = None, job_log: TextIO | None = None
) -> Iterator[MetricsWriter]:
    """Open the run folder and yield a metrics writer; resume if `resume_from` is given."""
    if resume_from is None:
        folder = RunFolder.create(run, overwrite=False)
    else:
        folder = RunFolder.reopen(run)
    try:
        metrics = MetricsWriter(run, folder.path, resume_from=resume_from, job_log=job_log)
        yield metrics
        metrics.close()
    finally:
        folder.close()


def make_worker_weights(version: int, pause_s: float) -> WorkerWeights:
    canary = CanaryReport(version=version, content_hash="ab" * 16, error=1e-7)
    return WorkerWeights(canary, fetch_s=0.5, pause_s=pause_s, num_bytes_fetched=100)


def log_steps(metrics: MetricsWriter, first_step: int, last_step: int) -> None:
    metrics.log_phase(Phase.TRAIN, first_step - 1)
    for step in range(first_step, last_step + 1):
        values = {TrainMetric.NUM_WINS: 4.0, TrainMetric.LOSS: 1 / step}
        metrics.log_step(step, 10 * step, values, {"openspiel": {TrainMetric.NUM_WINS: 4.0}})


def read_steps(path: Path, kind: str = "train") -> list[int]:
    return [row.step for row in read_metrics(path) if row.kind == kind]


def test_rows_of_an_environment_say_whether_it_is_a_game(tmp_path: Path) -> None:
    run = make_config(tmp_path)
    with open_metrics(run) as metrics:
        metrics.set_environments({"openspiel": {}, "sums": {}}, {"openspiel"})
        for name in ("openspiel", "sums"):
            metrics.log_step(1, 10, {}, {name: {TrainMetric.NUM_WINS: 4.0}})
    rows = read_metrics(run.folder)
    assert [(row.environment, row.is_game) for row in rows] == [
        (None, True),
        ("openspiel", True),
        (None, True),
        ("sums", False),
    ]


def read_tensorboard_steps(path: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


def test_every_kind_of_row_is_written(tmp_path: Path) -> None:
    won_outcomes = [EpisodeOutcome(seed, 1.0, 1, success=True) for seed in range(4)]
    lost_outcomes = [EpisodeOutcome(seed, -1.0, 1, success=False) for seed in range(4)]
    report = EvalReport(
        policy=summarize(won_outcomes),
        baselines={"random": summarize(lost_outcomes)},
        temperature=1.0,
        gap_closed=0.5,
        gap_closed_ci95=(0.25, 0.75),
    )
    run = make_config(tmp_path)
    with open_metrics(run) as metrics:
        log_steps(metrics, 1, 1)
        metrics.log_evaluation(1, 10, "openspiel", report)
        metrics.log_delivery(2, {1: make_worker_weights(2, 0.25), 0: make_worker_weights(2, 0.75)})
        metrics.log_event(2, {TrainMetric.NUM_LEARNER_RESTARTS: 1})
        metrics.log_checkpoint(2, 0.5)
    rows = list(read_metrics(run.folder))
    (
        phase_row,
        train_row,
        environment_row,
        evaluation_row,
        baseline_row,
        weights_row,
        event_row,
        checkpoint_row,
    ) = rows
    assert (phase_row.kind, phase_row.phase) == ("phase", Phase.TRAIN)
    assert (train_row.kind, train_row.environment, train_row.values["loss"]) == ("train", None, 1.0)
    assert (environment_row.kind, environment_row.environment) == ("environment", "openspiel")
    assert environment_row.values == {"num_wins": 4}
    assert (evaluation_row.kind, evaluation_row.environment) == ("eval", "openspiel")
    assert evaluation_row.values[EvalMetric.GAP_CLOSED] == 0.5
    assert (baseline_row.kind, baseline_row.policy) == ("baseline", "random")
    assert baseline_row.values[EvalMetric.WIN_RATE] == 0
    assert EvalMetric.GAP_CLOSED not in baseline_row.values
    assert [worker.worker for worker in weights_row.weights] == [0, 1]
    assert weights_row.weights[0].content_hash == "ab" * 16
    assert weights_row.values == {
        "weight_fetch_s": 0.5,
        "sampler_pause_s": 0.75,
        "weight_fetch_bytes": 200,
    }
    assert (event_row.kind, event_row.values) == ("event", {"num_learner_restarts": 1})
    assert checkpoint_row.kind == "event"
    assert checkpoint_row.values == {"num_checkpoints": 1, "checkpoint_s": 0.5}


def test_resumed_run_records_each_step_once(tmp_path: Path) -> None:
    run = make_config(tmp_path, tensorboard=True)
    with open_metrics(run) as metrics:
        log_steps(metrics, 1, 5)
    with open_metrics(run, resume_from=3) as metrics:
        metrics.log_phase(Phase.START_WORKERS)
        log_steps(metrics, 4, 6)
    phase_rows = [row for row in read_metrics(run.folder) if row.kind == "phase"]
    assert [row.step for row in phase_rows if row.phase is Phase.START_WORKERS] == [3]
    assert read_steps(run.folder) == [1, 2, 3, 4, 5, 6]
    assert read_tensorboard_steps(run.folder) == [1, 2, 3, 4, 5, 6]


def test_rewound_run_records_each_step_once(tmp_path: Path) -> None:
    run = make_config(tmp_path, tensorboard=True)
    with open_metrics(run) as metrics:
        log_steps(metrics, 1, 5)
        metrics.rewind(2)
        log_steps(metrics, 3, 3)
    assert read_steps(run.folder) == [1, 2, 3]
    assert read_steps(run.folder, "environment") == [1, 2, 3]
    assert read_tensorboard_steps(run.folder) == [1, 2, 3]


@pytest.mark.slow
def test_sink_that_fails_to_open_leaves_existing_rows_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = make_config(tmp_path)
    with open_metrics(run) as metrics:
        log_steps(metrics, 1, 2)
    with (
        pytest.raises(ConfigError, match="WANDB_API_KEY"),
        open_metrics(make_config(tmp_path, wandb={}), resume_from=2),
    ):
        pass
    assert read_steps(run.folder) == [1, 2]


def make_files(folder: Path, *names: str) -> None:
    """Write files of a run: `config.json` with its kind, and others with `{}`."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"kind": "network"}' if name == "config.json" else "{}")


@pytest.mark.parametrize(
    "file_names",
    [
        ["config.json.partial"],
        ["config.json", "trainer.log", "initial_model/config.json"],
        ["config.json", "checkpoints/step-00000005.partial/learner/rank-0"],
    ],
)
def test_run_killed_before_the_first_checkpoint_can_be_overwritten(
    tmp_path: Path, file_names: list[str]
) -> None:
    make_files(tmp_path / "demo", *file_names)
    folder = RunFolder.create(make_config(tmp_path), overwrite=True)
    folder.close()
    assert [path.name for path in folder.path.rglob("*")] == ["config.json"]


def test_folder_without_a_run_is_not_overwritten(tmp_path: Path) -> None:
    make_files(tmp_path / "demo", "thesis.txt")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        RunFolder.create(make_config(tmp_path), overwrite=True)
    assert (tmp_path / "demo" / "thesis.txt").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("config", ['{"model_type": "llama"}', '{"theme": "dark"}', "[", "{}"])
def test_folder_with_another_config_file_is_not_overwritten(
    tmp_path: Path, overwrite: bool, config: str
) -> None:
    make_files(tmp_path / "demo", "model.safetensors")
    (tmp_path / "demo" / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="not the folder of a run"):
        RunFolder.create(make_config(tmp_path), overwrite=overwrite)
    assert (tmp_path / "demo" / "model.safetensors").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_run_folder_in_use_is_not_changed(tmp_path: Path, overwrite: bool) -> None:
    folder = RunFolder.create(make_config(tmp_path), overwrite=False)
    (folder.path / "initial_model").mkdir()
    with pytest.raises(ConfigError, match="is in use: process"):
        RunFolder.create(make_config(tmp_path, tensorboard=True), overwrite=overwrite)
    with pytest.raises(ConfigError, match="is in use: process"):
        RunFolder.reopen(make_config(tmp_path, tensorboard=True))
    assert (folder.path / "initial_model").is_dir()
    assert '"tensorboard": false' in (folder.path / "config.json").read_text()
    folder.close()
    RunFolder.create(make_config(tmp_path), overwrite=True).close()


def test_rewind_removes_traces_of_later_steps(tmp_path: Path) -> None:
    run = make_config(tmp_path)
    with open_metrics(run) as metrics:
        for step in (1, 2, 3):
            metrics.log_trace(make_trace(step, StepTimes(wait_s=1.0), []))
        metrics.rewind(2)
        metrics.log_trace(make_trace(3, StepTimes(wait_s=5.0), []))
    traces = [(trace.step, trace.wait_s) for trace in read_traces(run.folder)]
    assert traces == [(1, 1.0), (2, 1.0), (3, 5.0)]


def test_rewind_removes_transcripts_of_later_steps(tmp_path: Path) -> None:
    run = make_config(tmp_path)
    with open_metrics(run) as metrics:
        for step in (1, 2, 3):
            metrics.log_transcripts(step, [transcript(0)])
        metrics.rewind(2)
        metrics.log_transcripts(3, [transcript(0, answer="HIT")])
    transcripts = [(record.step, record.turns[0].answer) for record in read_transcripts(run.folder)]
    assert transcripts == [(1, "STAND"), (2, "STAND"), (3, "HIT")]


def test_partially_removed_run_folder_can_be_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_files(tmp_path / "demo", "config.json", "a/b", "trainer.log", "z/b")
    removed_paths: list[Path] = []

    def remove_one_path(path: Path) -> None:
        """Record one removed path, and interrupt the next removal."""
        if removed_paths:
            raise KeyboardInterrupt
        removed_paths.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle.shutil, "rmtree", remove_one_path)
        with pytest.raises(KeyboardInterrupt):
            RunFolder.create(make_config(tmp_path), overwrite=True)
    RunFolder.create(make_config(tmp_path), overwrite=False).close()


def test_error_for_unwritable_folder_contains_path_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"runs/demo' cannot be written .*; set output_dir"):
        RunFolder.create(make_config(tmp_path / "runs"), overwrite=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder.reopen(make_config(tmp_path / "runs"))


def test_run_id_survives_resume_and_overwrite_but_differs_per_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(make_config(tmp_path), overwrite=False)
    run_id = ensure_run_id(folder.path)
    folder.close()
    resumed_folder = RunFolder.reopen(make_config(tmp_path))
    assert ensure_run_id(resumed_folder.path) == run_id
    resumed_folder.close()
    replacement_folder = RunFolder.create(make_config(tmp_path), overwrite=True)
    assert ensure_run_id(replacement_folder.path) == run_id
    replacement_folder.discard()
    assert not replacement_folder.path.exists()
    second_run_folder = RunFolder.create(make_config(tmp_path / "second"), overwrite=False)
    assert ensure_run_id(second_run_folder.path) != run_id
    second_run_folder.close()


def test_relative_output_dir_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_config(Path("runs")).folder == tmp_path / "runs" / "demo"


def test_job_log_has_a_line_for_each_phase_step_and_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_config(tmp_path)
    with open_metrics(run, job_log=sys.stdout) as metrics:
        metrics.set_environments({"blackjack": {}}, {"blackjack"})
        log_steps(metrics, 1, 2)
        metrics.log_delivery(2, {0: make_worker_weights(2, 0.25)})
        metrics.log_event(2, {TrainMetric.NUM_UNLOCKS: 1}, environment="blackjack")
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(LOG_ROW_PREFIX) for line in lines)
    rows = [MetricsRow.model_validate_json(line.removeprefix(LOG_ROW_PREFIX)) for line in lines]
    row_kinds = [(row.kind, row.step) for row in rows]
    assert row_kinds == [("phase", 0), ("train", 1), ("train", 2), ("event", 2)]
    logged_kinds = ("phase", "train", "event")
    assert rows == [row for row in read_metrics(run.folder) if row.kind in logged_kinds]
