from __future__ import annotations

from pathlib import Path

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
    read_transcripts,
)
from ludus.trainer.run import folder as run_folder
from ludus.trainer.run.folder import RunFolder, run_id
from ludus.trainer.run.metrics import StepValues
from ludus.trainer.weights import CanaryReport, WorkerWeights
from tests.report.synthetic_run import transcript


def config(output_dir: Path, **metrics: object) -> LanguageModelRun:
    return LanguageModelRun.model_validate(
        {"name": "demo", "output_dir": str(output_dir), "metrics": metrics}
    )


def step_values(step: int) -> StepValues:
    own = {TrainMetric.NUM_WINS: 4.0}
    return StepValues(own | {TrainMetric.LOSS: 1 / step}, {"openspiel": own})


def worker_weights(version: int, pause_s: float) -> WorkerWeights:
    canary = CanaryReport(version=version, content_hash="ab" * 16, error=1e-7)
    return WorkerWeights(canary, fetch_s=0.5, pause_s=pause_s, bytes_fetched=100)


def train(folder: RunFolder, first: int, last: int) -> None:
    folder.phase(Phase.TRAIN, first - 1)
    for step in range(first, last + 1):
        folder.trained(step, 10 * step, step_values(step))


def steps(folder: RunFolder, kind: str = "train") -> list[int]:
    return [row.step for row in read_metrics(folder.path) if row.kind == kind]


def tensorboard_steps(folder: RunFolder) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


def test_a_step_an_evaluation_a_delivery_and_an_event_become_rows(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), overwrite=False)
    train(folder, 1, 1)
    won = [EpisodeOutcome(seed, 1.0, 1, success=True) for seed in range(4)]
    lost = [EpisodeOutcome(seed, -1.0, 1, success=False) for seed in range(4)]
    report = EvalReport(
        policy=summarize(won),
        baselines={"random": summarize(lost)},
        temperature=1.0,
        gap_closed=0.5,
        gap_closed_ci95=(0.25, 0.75),
    )
    folder.evaluated(1, 10, "openspiel", report)
    folder.delivered(2, {1: worker_weights(2, 0.25), 0: worker_weights(2, 0.75)})
    folder.happened(2, TrainMetric.NUM_LEARNER_RESTARTS)
    folder.saved(2, 0.5)
    folder.close()
    phase, whole, own, judged, fixed, weights, event, saved = read_metrics(folder.path)
    assert (phase.kind, phase.phase) == ("phase", Phase.TRAIN)
    assert (whole.kind, whole.environment, whole.values["loss"]) == ("train", None, 1.0)
    assert (own.kind, own.environment, own.values) == ("environment", "openspiel", {"num_wins": 4})
    assert (judged.kind, judged.environment) == ("eval", "openspiel")
    assert judged.values[EvalMetric.GAP_CLOSED] == 0.5
    assert (fixed.kind, fixed.policy) == ("baseline", "random")
    assert fixed.values[EvalMetric.WIN_RATE] == 0
    assert EvalMetric.GAP_CLOSED not in fixed.values
    assert [held.worker for held in weights.weights] == [0, 1]
    assert weights.weights[0].content_hash == "ab" * 16
    assert weights.values == {
        "weight_fetch_s": 0.5,
        "sampler_pause_s": 0.75,
        "weight_fetch_bytes": 200,
    }
    assert (event.kind, event.values) == ("event", {"num_learner_restarts": 1})
    assert (saved.kind, saved.values) == ("event", {"num_checkpoints": 1, "checkpoint_s": 0.5})


def test_a_resumed_run_has_each_step_once_in_every_place(tmp_path: Path) -> None:
    run = config(tmp_path, tensorboard=True)
    before = RunFolder.create(run, overwrite=False)
    before.open_sinks()
    train(before, 1, 5)
    before.close()
    after = RunFolder.reopen(run, 3)
    after.open_sinks()
    train(after, 4, 6)
    after.close()
    assert steps(after) == [1, 2, 3, 4, 5, 6]
    assert tensorboard_steps(after) == [1, 2, 3, 4, 5, 6]


def test_a_run_that_goes_back_while_it_runs_has_each_step_once_in_every_place(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(config(tmp_path, tensorboard=True), overwrite=False)
    folder.open_sinks()
    train(folder, 1, 5)
    folder.rewind(2)
    train(folder, 3, 3)
    folder.close()
    assert steps(folder) == [1, 2, 3]
    assert steps(folder, "environment") == [1, 2, 3]
    assert tensorboard_steps(folder) == [1, 2, 3]


def test_a_run_whose_sink_cannot_start_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    folder = RunFolder.create(config(tmp_path), overwrite=False)
    train(folder, 1, 2)
    folder.close()
    again = RunFolder.reopen(config(tmp_path, wandb={}), 2)
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        again.open_sinks()
    again.close()
    assert steps(folder) == [1, 2]


def leave(path: Path, *files: str) -> None:
    """Leave a folder as a run does that is killed early on."""
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")


@pytest.mark.parametrize(
    "files",
    [
        ["config.json.partial"],
        ["config.json", "trainer.log", "initial_model/config.json"],
        ["config.json", "checkpoints/step-00000005.partial/learner/rank-0"],
    ],
)
def test_what_a_run_left_that_died_before_its_first_checkpoint_is_replaced(
    tmp_path: Path, files: list[str]
) -> None:
    leave(tmp_path / "demo", *files)
    folder = RunFolder.create(config(tmp_path), overwrite=True)
    folder.close()
    left = {str(path.relative_to(folder.path)) for path in folder.path.rglob("*")}
    assert left == {"config.json", "metrics.jsonl", "transcripts.jsonl"}


def test_a_folder_that_is_no_runs_is_left_alone(tmp_path: Path) -> None:
    leave(tmp_path / "demo", "thesis.txt")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        RunFolder.create(config(tmp_path), overwrite=True)
    assert (tmp_path / "demo" / "thesis.txt").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_another_process_trains_is_left_alone(tmp_path: Path, overwrite: bool) -> None:
    first = RunFolder.create(config(tmp_path), overwrite=False)
    (first.path / "initial_model").mkdir()
    with pytest.raises(ConfigError, match="is in use: process"):
        RunFolder.create(config(tmp_path, tensorboard=True), overwrite=overwrite)
    with pytest.raises(ConfigError, match="is in use: process"):
        RunFolder.reopen(config(tmp_path, tensorboard=True), 0)
    assert (first.path / "initial_model").is_dir()
    assert '"tensorboard": false' in (first.path / "config.json").read_text()
    first.close()
    RunFolder.create(config(tmp_path), overwrite=True).close()


def test_what_was_said_after_a_step_goes_with_it(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), overwrite=False)
    for step in (1, 2, 3):
        folder.said(step, [transcript(0)])
    folder.rewind(2)
    folder.said(3, [transcript(0, answer="HIT")])
    folder.close()
    said = [(one.step, one.turns[0].answer) for one in read_transcripts(folder.path)]
    assert said == [(1, "STAND"), (2, "STAND"), (3, "HIT")]


def test_a_folder_that_is_half_removed_is_still_known_as_a_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path / "demo", "config.json", "a/b", "trainer.log", "z/b")
    removed: list[Path] = []

    def remove_one(path: Path) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(path)

    with monkeypatch.context() as patched:
        patched.setattr(run_folder.shutil, "rmtree", remove_one)
        with pytest.raises(KeyboardInterrupt):
            RunFolder.create(config(tmp_path), overwrite=True)
    RunFolder.create(config(tmp_path), overwrite=False).close()


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"runs/demo' cannot be written .*; set output_dir"):
        RunFolder.create(config(tmp_path / "runs"), overwrite=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder.reopen(config(tmp_path / "runs"), 3)


def test_a_run_keeps_its_id_until_nothing_is_left_of_it(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), overwrite=False)
    first = run_id(folder.path)
    folder.close()
    again = RunFolder.reopen(config(tmp_path), 0)
    assert run_id(again.path) == first
    again.close()
    replacing = RunFolder.create(config(tmp_path), overwrite=True)
    assert run_id(replacing.path) == first
    replacing.discard()
    assert not replacing.path.exists()
    elsewhere = RunFolder.create(config(tmp_path / "other"), overwrite=False)
    assert run_id(elsewhere.path) != first
    elsewhere.close()


def test_a_relative_folder_means_the_same_one_wherever_a_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder.path_of(config(Path("runs"))) == tmp_path / "runs" / "demo"


def test_the_log_of_a_job_has_a_line_for_each_step_and_for_what_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(config(tmp_path), overwrite=False)
    folder.open_sinks(in_job_log=True)
    folder.connected({"blackjack": {}})
    train(folder, 1, 2)
    folder.delivered(2, {0: worker_weights(2, 0.25)})
    folder.opened(2, 20, "blackjack")
    folder.close()
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(LOG_ROW_PREFIX) for line in lines)
    rows = [MetricsRow.model_validate_json(line.removeprefix(LOG_ROW_PREFIX)) for line in lines]
    kinds = [(row.kind, row.step) for row in rows]
    assert kinds == [("phase", 0), ("train", 1), ("train", 2), ("event", 2)]
    written = [row for row in read_metrics(folder.path) if row.kind in ("phase", "train", "event")]
    assert rows == written
