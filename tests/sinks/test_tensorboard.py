"""Tests of the TensorBoard sink."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ludus.proto.runs import Phase
from ludus.trainer.run.sinks import Sinks, open_sinks
from tests.sinks.mixed_run import make_eval_rows, make_phase_row, make_run_config, make_step_rows


def write_steps(sinks: Sinks, first_step: int, last_step: int) -> None:
    sinks.write(make_phase_row(Phase.TRAIN))
    for step in range(first_step, last_step + 1):
        for row in make_step_rows(step):
            sinks.write(row)


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, value) pairs by tag."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_event_file_contains_the_written_values(tmp_path: Path) -> None:
    sinks = open_sinks(make_run_config(tensorboard=True), tmp_path)
    write_steps(sinks, 1, 2)
    for row in make_eval_rows(2, 0.5):
        sinks.write(row)
    sinks.close()
    scalars = read_scalars(tmp_path)
    assert scalars["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert scalars["train/tic_tac_toe/num_wins"] == [(1, 60), (2, 60)]
    assert scalars["train/blackjack/reward_term.format"] == [(1, 0.5), (2, 0.5)]
    assert scalars["eval/blackjack/win_rate"] == [(2, 0.5)]
    assert [step for step, _ in scalars["eval/blackjack/random/win_rate"]] == [2]


def test_resumed_run_replaces_values_after_the_checkpoint(tmp_path: Path) -> None:
    run = make_run_config(tensorboard=True)
    sinks = open_sinks(run, tmp_path)
    write_steps(sinks, 1, 6)
    sinks.close()
    (first_file,) = (tmp_path / "tensorboard").iterdir()
    # TensorBoard numbers the files of a process, and reads file 10 before file 9 of a second.
    first_file.rename(first_file.with_suffix(".99"))
    resumed_sinks = open_sinks(run, tmp_path, resume_from=4)
    write_steps(resumed_sinks, 5, 5)
    resumed_sinks.close()
    assert [step for step, _ in read_scalars(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5]


def test_rewound_run_has_each_step_once(tmp_path: Path) -> None:
    sinks = open_sinks(make_run_config(tensorboard=True), tmp_path)
    write_steps(sinks, 1, 6)
    sinks.rewind(2)
    write_steps(sinks, 3, 4)
    sinks.close()
    assert [step for step, _ in read_scalars(tmp_path)["train/loss"]] == [1, 2, 3, 4]
