from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from ludus.proto.metrics import EvalMetric, TrainMetric
from ludus.proto.runs import LOG_ROW_PREFIX, METRICS_FILE, MetricsRow, Phase
from ludus.services.cli import progress as progress_module
from ludus.services.cli.progress import PlainView, RunProgress, TerminalView
from ludus.services.cli.records_follower import RecordsFollower
from ludus.services.cli.trainer_process import NUM_LAST_LINES, TrainerOutput


def make_train_row(step: int, elapsed_s: float, **values: float) -> MetricsRow:
    return MetricsRow(
        kind="train",
        step=step,
        elapsed_s=elapsed_s,
        num_games_trained=step * 512,
        values=values,
    )


def make_phase_row(phase: Phase) -> MetricsRow:
    return MetricsRow(kind="phase", step=0, phase=phase, elapsed_s=0, num_games_trained=0)


def make_eval_row(
    step: int, win_rate: float, environment: str = "blackjack", *, is_game: bool = True
) -> MetricsRow:
    values = {
        EvalMetric.WIN_RATE: win_rate,
        EvalMetric.WIN_RATE_CI95_LOW: win_rate - 0.02,
        EvalMetric.WIN_RATE_CI95_HIGH: win_rate + 0.02,
        EvalMetric.RETURN_MEAN: 2 * win_rate - 1,
    }
    return MetricsRow(
        kind="eval",
        step=step,
        environment=environment,
        is_game=is_game,
        elapsed_s=step,
        num_games_trained=step * 512,
        values=values,
    )


def encode_rows(*rows: MetricsRow) -> bytes:
    return b"".join(row.model_dump_json(exclude_defaults=True).encode() + b"\n" for row in rows)


def test_line_contains_the_replaced_groups_and_the_steps_at_the_limit() -> None:
    progress = RunProgress(num_steps=9)
    progress.update([make_train_row(1, 1.0, num_groups_replaced=0, num_groups_kept=0)])
    assert "replaced groups" not in progress.format_line()
    progress.update([make_train_row(2, 2.0, num_groups_replaced=64, num_groups_kept=0)])
    assert " · replaced groups 32 per step · " in progress.format_line()
    progress.update([make_train_row(3, 3.0, num_groups_replaced=32, num_groups_kept=5)])
    assert (
        " · replaced groups 32 per step, at the limit in 1 of 3 steps · " in progress.format_line()
    )


def make_unlock_row(step: int, environment: str) -> MetricsRow:
    return MetricsRow(
        kind="event",
        step=step,
        environment=environment,
        elapsed_s=step,
        num_games_trained=step * 512,
        values={TrainMetric.NUM_UNLOCKS: 1},
    )


def test_progress_shows_the_open_environments_of_the_curriculum() -> None:
    progress = RunProgress(num_steps=100)
    open_environments = []
    for num_open, names in ((1, []), (2, ["hard"]), (2, []), (1, []), (2, ["hard"])):
        values = {TrainMetric.NUM_ENVIRONMENTS_OPEN.value: float(num_open)}
        progress.update(
            [make_train_row(1, 1.0, **values), *(make_unlock_row(1, name) for name in names)]
        )
        open_environments.append(progress.list_facts()["open environments"])
    assert open_environments == ["1", "2, newest hard", "2, newest hard", "1", "2, newest hard"]


def test_a_run_without_a_curriculum_shows_no_open_environments() -> None:
    progress = RunProgress(num_steps=100)
    progress.update([make_train_row(1, 1.0)])
    assert "open environments" not in progress.list_facts()


def test_remaining_time_uses_the_rate_of_recent_steps() -> None:
    progress = RunProgress(num_steps=100)
    assert progress.remaining_s is None
    progress.update([make_train_row(1, 50.0)])
    assert progress.remaining_s is None
    # After a slow first step, each step takes half a second.
    progress.update([make_train_row(step, 50.0 + 0.5 * (step - 1)) for step in range(2, 41)])
    assert progress.remaining_s == 30.0


def test_progress_shows_evaluation_mean_reward_and_void_episodes() -> None:
    progress = RunProgress(num_steps=100)
    rewards = {
        TrainMetric.REWARD_MEAN.value: 0.5,
        TrainMetric.NUM_EPISODES_LOST.value: 2.0,
        TrainMetric.NUM_EPISODES_FAILED.value: 3.0,
    }
    progress.update([make_phase_row(Phase.TRAIN), make_eval_row(0, 0.28), make_eval_row(10, 0.4)])
    progress.update([make_train_row(step, step, **rewards) for step in range(8, 11)])
    facts = progress.list_facts()
    assert facts["wins"] == "40.0% (38.0 to 42.0%) at step 10"
    assert facts["return"] == "−0.200 at step 10"
    assert facts["reward"] == "0.500"
    assert facts["lost episodes"] == "6"
    assert facts["failed episodes"] == "9"
    assert progress.format_line().startswith("step 10/100 · training · wins 40.0%")


def test_tasks_are_solved_and_games_are_won() -> None:
    progress = RunProgress(num_steps=100)
    progress.update([make_eval_row(10, 0.4, "sums", is_game=False)])
    assert progress.list_facts()["solved"] == "40.0% (38.0 to 42.0%) at step 10"
    progress.update([make_eval_row(10, 0.5)])
    assert list(progress.list_facts())[:2] == ["solved in sums", "wins in blackjack"]


def test_progress_of_fine_tuning_shows_losses_and_conversations() -> None:
    progress = RunProgress(num_steps=100, unit="conversations")
    progress.update([make_train_row(1, 1.0, loss=2.5)])
    row = MetricsRow(
        kind="event",
        step=1,
        elapsed_s=1.0,
        num_games_trained=512,
        values={TrainMetric.VALIDATION_LOSS: 2.25},
    )
    progress.update([row])
    facts = progress.list_facts()
    assert (facts["loss"], facts["validation loss"]) == ("2.5000", "2.2500")
    assert facts["conversations"] == "512" and "episodes" not in facts


def test_progress_of_a_run_with_rewards_shows_no_loss() -> None:
    progress = RunProgress(num_steps=100)
    progress.update([make_train_row(1, 1.0, loss=2.5, reward_mean=0.5)])
    assert "loss" not in progress.list_facts()


def test_a_resumed_run_counts_each_step_once() -> None:
    progress = RunProgress(num_steps=100)
    lost_episodes = {TrainMetric.NUM_EPISODES_LOST.value: 2.0}
    progress.update([make_train_row(step, step, **lost_episodes) for step in range(1, 6)])
    # A resume rewrites the metrics file, and the follower reads the new file from the start.
    progress.update([make_train_row(step, step, **lost_episodes) for step in range(1, 4)])
    assert (progress.step, progress.num_games_trained) == (3, 3 * 512)
    assert progress.list_facts()["lost episodes"] == "10"


def test_progress_of_a_mixed_run_shows_every_environment() -> None:
    progress = RunProgress(num_steps=100)
    progress.update(
        [make_eval_row(0, 0.28), make_eval_row(0, 0.2, "catch"), make_eval_row(10, 0.9, "catch")]
    )
    facts = progress.list_facts()
    assert facts["wins in blackjack"] == "28.0% (26.0 to 30.0%) at step 0"
    assert facts["wins in catch"] == "90.0% (88.0 to 92.0%) at step 10"
    assert "wins" not in facts


def test_progress_shows_the_return_of_an_environment_without_success() -> None:
    pole_row = make_eval_row(0, 0.9, "pole")
    values = {EvalMetric.RETURN_MEAN.value: 17.0}
    progress = RunProgress(num_steps=100)
    progress.update([make_eval_row(0, 0.28), pole_row.model_copy(update={"values": values})])
    facts = progress.list_facts()
    assert (facts["wins in blackjack"], facts["return in pole"]) == (
        "28.0% (26.0 to 30.0%) at step 0",
        "17.000 at step 0",
    )
    assert "wins in pole" not in facts


def test_step_means_are_weighted_by_the_number_of_episodes() -> None:
    progress = RunProgress(num_steps=100)
    values_1 = {"reward_mean": 1.0, "num_episodes_scored": 10.0, "canary_error": 0.25}
    values_2 = {"reward_mean": 0.0, "num_episodes_scored": 30.0, "canary_error": 0.125}
    environment_row = MetricsRow(
        kind="environment",
        step=2,
        environment="catch",
        elapsed_s=2,
        num_games_trained=0,
        values={"reward_mean": 100.0, "num_episodes_scored": 1000.0},
    )
    progress.update(
        [make_train_row(1, 1, **values_1), make_train_row(2, 2, **values_2), environment_row]
    )
    assert progress.list_facts()["reward"] == "0.250"
    assert progress.list_facts()["canary error"] == "0.25"


def test_phase_name_of_a_stopping_run_is_stopping() -> None:
    progress = RunProgress(num_steps=10)
    progress.update([make_phase_row(Phase.EVALUATE)])
    assert progress.phase_name == "evaluating"
    progress.is_stopping = True
    assert progress.phase_name == "stopping, writing a checkpoint"


def test_follower_waits_for_whole_lines_and_returns_each_row_once(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    follower = RecordsFollower(path, MetricsRow, skips_old_file=True)
    assert follower.read_new() == []
    content = encode_rows(make_train_row(1, 1.0), make_train_row(2, 2.0))
    path.write_bytes(content[:-10])
    assert [row.step for row in follower.read_new()] == [1]
    assert follower.read_new() == []
    path.write_bytes(content)
    assert [row.step for row in follower.read_new()] == [2]


def test_follower_ignores_the_rows_of_a_replaced_run(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_bytes(encode_rows(*(make_train_row(step, step) for step in range(1, 50))))
    os.utime(path, ns=(1, 1))
    follower = RecordsFollower(path, MetricsRow, skips_old_file=True)
    assert follower.read_new() == []
    path.unlink()
    assert follower.read_new() == []
    path.write_bytes(encode_rows(make_train_row(1, 1.0)))
    assert [row.step for row in follower.read_new()] == [1]


def test_follower_restarts_on_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    follower = RecordsFollower(path, MetricsRow, skips_old_file=True)
    path.write_bytes(encode_rows(*(make_train_row(step, step) for step in range(1, 6))))
    assert len(follower.read_new()) == 5
    # The new file has fewer rows but may contain more bytes.
    replacement = tmp_path / "replacement"
    replacement.write_bytes(
        encode_rows(*(make_train_row(step, step, loss=0.12345678) for step in range(1, 5)))
    )
    replacement.replace(path)
    assert [row.step for row in follower.read_new()] == [1, 2, 3, 4]
    path.write_bytes(encode_rows(make_train_row(1, 1.0)))
    assert [row.step for row in follower.read_new()] == [1]
    assert follower.num_unreadable == 0


def test_an_invalid_line_is_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    follower = RecordsFollower(path, MetricsRow, skips_old_file=True)
    path.write_bytes(b'{"kind": "unknown"}\n' + encode_rows(make_train_row(1, 1.0)))
    assert [row.step for row in follower.read_new()] == [1]
    assert follower.num_unreadable == 1


@pytest.fixture
def no_interval_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep PlainView from printing lines because of elapsed time."""
    monkeypatch.setattr(progress_module, "PLAIN_INTERVAL_S", 3600.0)


@pytest.mark.usefixtures("no_interval_lines")
def test_plain_view_prints_one_line_per_phase_and_the_final_state() -> None:
    output_buffer = io.StringIO()
    view = PlainView(Console(file=output_buffer, width=120))
    progress = RunProgress(num_steps=3)
    progress.update([make_phase_row(Phase.TRAIN)])
    for step in (1, 2, 3):
        progress.update([make_train_row(step, step)])
        view.refresh(progress)
    view.finish(progress)
    lines = output_buffer.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/3 · training")
    assert lines[1].startswith("step 3/3 · training")


@pytest.mark.usefixtures("no_interval_lines")
def test_plain_view_skips_lines_of_frequent_phase_changes() -> None:
    output_buffer = io.StringIO()
    view = PlainView(Console(file=output_buffer, width=120))
    progress = RunProgress(num_steps=30)
    for step in range(1, 31):
        for phase in (Phase.SAVE_CHECKPOINT, Phase.EVALUATE, Phase.TRAIN):
            progress.update([make_phase_row(phase), make_train_row(step, step)])
            view.refresh(progress)
    view.finish(progress)
    phases = [line.split(" · ")[1] for line in output_buffer.getvalue().splitlines()]
    assert phases == ["saving a checkpoint", "evaluating", "training", "training"]


def test_follower_returns_no_rows_if_the_folder_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    assert RecordsFollower(tmp_path / "runs" / METRICS_FILE, MetricsRow).read_new() == []


def test_terminal_view_shows_phase_bar_and_facts() -> None:
    output_buffer = io.StringIO()
    console = Console(file=output_buffer, width=100, force_terminal=True, color_system=None)
    live = Live(console=console, auto_refresh=False)
    progress = RunProgress(num_steps=20)
    progress.update([make_phase_row(Phase.TRAIN), make_eval_row(0, 0.3)])
    progress.update([make_train_row(step, step, tokens_per_second=2000.0) for step in range(1, 11)])
    TerminalView(console, live).refresh(progress)
    console.print(live.get_renderable())
    output_text = output_buffer.getvalue()
    for expected in ("training", "step 10/20", "10 s left", "30.0% (28.0 to 32.0%)", "2,000"):
        assert expected in output_text


def test_trainer_output_is_split_into_errors_warnings_and_last_lines() -> None:
    output = TrainerOutput()
    for line in (
        "error: first",
        "  more detail",
        "plain",
        "  indented",
        "warning: slow",
        "error: b",
    ):
        output.add_line(line)
    assert output.errors == ["first\n  more detail", "b"]
    assert list(output.warnings) == ["slow"]
    previous_lines = list(output.last_lines)
    output.add_line(f"{LOG_ROW_PREFIX}{{}}")
    assert list(output.last_lines) == previous_lines, "a metrics row was added to the last lines"
    for index in range(100):
        output.add_line(str(index))
    assert len(output.last_lines) == NUM_LAST_LINES
    assert output.last_lines[-1] == "99"
