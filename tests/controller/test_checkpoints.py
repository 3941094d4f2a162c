"""A checkpoint is committed only when complete, and skipped if it is damaged later."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.errors import CheckpointError, ConfigError
from ludus.trainer.core.types import SavedFile
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.run.checkpoint import (
    CheckpointFolder,
    RunState,
    SavedState,
    check_complete,
    find_checkpoint,
    find_newest_checkpoint,
    list_checkpoints,
    read_state,
    restore_learner_state,
)
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers

pytestmark = pytest.mark.timeout(120)

FILE_NAMES = (
    "learner/.metadata",
    "learner/__0_0.distcp",
    "learner/__1_0.distcp",
    "model/config.json",
)


def write_files(folder: Path) -> list[SavedFile]:
    """Write the files of two ranks; return a SavedFile for each."""
    for name in FILE_NAMES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name * 10)
    return [SavedFile.from_path(folder / name) for name in FILE_NAMES]


async def save_checkpoint(folder: Path, step: int, num_kept: int = 2) -> Path:
    """Write a checkpoint of `step`; return its path."""
    checkpoints = CheckpointFolder(folder, num_kept)
    with checkpoints.prepare(step) as folder:
        return await checkpoints.commit(folder, RunState(step=step), write_files(folder))


def list_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in `folder`."""
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5])


def change(file: Path) -> None:
    """Change the last byte that is not a space or a bracket; the size remains."""
    content = file.read_bytes().rstrip(b"\n}")
    rest = file.read_bytes()[len(content) :]
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) + rest)


@pytest.mark.parametrize("damage", [remove, truncate])
@pytest.mark.parametrize("name", ["learner/__1_0.distcp", "model/config.json"])
async def test_incomplete_checkpoint_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: Callable[[Path], None]
) -> None:
    monkeypatch.setattr("ludus.trainer.run.checkpoint.VISIBLE_TIMEOUT_S", 0.0)
    await save_checkpoint(tmp_path, 5, num_kept=1)
    checkpoints = CheckpointFolder(tmp_path, num_kept=1)
    with (
        pytest.raises(CheckpointError, match=rf"'{name}'.*output_dir"),
        checkpoints.prepare(10) as folder,
    ):
        saved_files = write_files(folder)
        damage(folder / name)
        await checkpoints.commit(folder, RunState(step=10), saved_files)
    assert read_state(find_newest_checkpoint(tmp_path), RunState).step == 5


@pytest.mark.parametrize("steps", [[], [5], [5, 7]], ids=str)
async def test_full_disk_leaves_no_partial_checkpoint(tmp_path: Path, steps: list[int]) -> None:
    for step in steps:
        await save_checkpoint(tmp_path, step)
    if len(steps) > 1:
        truncate(tmp_path / f"step-{steps[-1]:08d}" / FILE_NAMES[0])
    entries = sorted(tmp_path.iterdir())
    newest_pattern = r"'.*/step-00000005'" if steps else "there is no earlier checkpoint"
    message = (
        rf"step-00000010.*No space left on device; [\d,]+ bytes are free there; .*{newest_pattern}"
    )
    with (
        pytest.raises(CheckpointError, match=message),
        CheckpointFolder(tmp_path, num_kept=1).prepare(10) as folder,
    ):
        write_files(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert sorted(tmp_path.iterdir()) == entries


async def test_commit_waits_for_a_late_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointFolder(tmp_path, num_kept=1)
    with checkpoints.prepare(10) as folder:
        saved_files = write_files(folder)
        late_file = folder / "learner" / "__1_0.distcp"
        text = late_file.read_text()
        late_file.unlink()
        monkeypatch.setattr(
            "ludus.trainer.run.checkpoint.time.sleep", lambda _: late_file.write_text(text)
        )
        checkpoint = await checkpoints.commit(folder, RunState(step=10), saved_files)
    assert checkpoint == find_newest_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", [remove, truncate, change])
@pytest.mark.parametrize("name", [*FILE_NAMES, "state.json", "files.json"])
async def test_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    damage: Callable[[Path], None],
) -> None:
    intact_checkpoint = await save_checkpoint(tmp_path, 5)
    damage(await save_checkpoint(tmp_path, 10) / name)
    assert find_newest_checkpoint(tmp_path) == intact_checkpoint
    assert "step-00000010' cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file_list",
    [
        "[]",
        '{"num_bytes": 5}',
        '{"num_bytes": {"state.json": "many"}}',
        '{"num_bytes": {"../outside": 7}}',
        '{"num_bytes": {"/dev/zero": 0}}',
        '{"num_bytes": {"pipe": 0}}',
        '{"num_bytes": {"learner/.metadata": 170}, "blake3": {}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
async def test_wrong_list_of_files_is_a_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file_list: str
) -> None:
    (tmp_path / "outside").write_text("outside")
    intact_checkpoint = await save_checkpoint(tmp_path, 5)
    checkpoint = await save_checkpoint(tmp_path, 10)
    os.mkfifo(checkpoint / "pipe")
    (checkpoint / "files.json").write_text(file_list)
    assert find_newest_checkpoint(tmp_path) == intact_checkpoint
    assert "step-00000010' cannot be read" in capsys.readouterr().err


async def test_checkpoint_without_checksums_is_used_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = await save_checkpoint(tmp_path, 5)
    file_list = json.loads((checkpoint / "files.json").read_text())
    del file_list["blake3"]
    (checkpoint / "files.json").write_text(json.dumps(file_list))
    change(checkpoint / "learner" / ".metadata")
    assert find_newest_checkpoint(tmp_path) == checkpoint
    assert "step-00000005' was written without checksums" in capsys.readouterr().err


async def test_named_checkpoint_is_checked_too(tmp_path: Path) -> None:
    checkpoint = await save_checkpoint(tmp_path, 5)
    assert find_checkpoint(checkpoint, tmp_path) == checkpoint
    change(checkpoint / "model" / "config.json")
    with pytest.raises(CheckpointError, match=r"the content of 'model/config\.json' differs"):
        find_checkpoint(checkpoint, tmp_path)


def test_state_with_a_function_is_refused(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path, num_kept=1).save(RunState(step=5), {"policy": os.system})
    with pytest.raises(CheckpointError, match="an object other than tensors and plain values"):
        restore_learner_state(tmp_path / "step-00000005", lambda _: None)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"weights": {}}, "it has no value 'policy'"),
        ({"policy": 3}, "expected a map"),
    ],
)
def test_state_of_another_kind_is_refused(tmp_path: Path, state: Any, reason: str) -> None:
    def restore(state: dict[str, Any]) -> None:
        if not isinstance(state["policy"], dict):
            raise TypeError("expected a map")

    CheckpointFolder(tmp_path, num_kept=1).save(RunState(step=5), state)
    with pytest.raises(CheckpointError, match=f"cannot be read: .*{reason}"):
        restore_learner_state(tmp_path / "step-00000005", restore)


def test_errors_of_the_user_pass_through_the_restore(tmp_path: Path) -> None:
    def restore(state: dict[str, Any]) -> None:
        raise ConfigError("the critic's rate changed")

    CheckpointFolder(tmp_path, num_kept=1).save(RunState(step=5), {})
    with pytest.raises(ConfigError, match="rate changed"):
        restore_learner_state(tmp_path / "step-00000005", restore)


async def test_search_fails_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    for step in (5, 10):
        remove(await save_checkpoint(tmp_path, step) / "learner" / ".metadata")
    with pytest.raises(CheckpointError, match="step-00000005' cannot be read"):
        find_newest_checkpoint(tmp_path)


async def test_new_checkpoint_replaces_a_skipped_checkpoint(
    tmp_path: Path,
) -> None:
    await save_checkpoint(tmp_path, 5, num_kept=1)
    (tmp_path / "step-00000010").mkdir()
    await save_checkpoint(tmp_path, 6, num_kept=1)
    assert list_steps(tmp_path) == [6]


async def test_oldest_checkpoints_are_removed(tmp_path: Path) -> None:
    for step in (5, 10, 15, 15):
        await save_checkpoint(tmp_path, step, num_kept=2)
    assert list_steps(tmp_path) == [10, 15]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]


def make_run(folder: Path, **training: Any) -> SimulatedRun:
    """Return a run with a checkpoint every third step."""
    training = {
        "num_steps": 12,
        "groups_per_step": 4,
        "max_staleness": 1,
        "checkpoint_every_steps": 3,
    } | training
    return SimulatedRun(folder, {"training": training})


def kill_learner_in_step(run: SimulatedRun, step: int, damage: Callable[[Path], None]) -> None:
    """Kill the learner and damage the newest checkpoint in the same step."""
    failing_steps = {step}

    def prepare(workers: SimulatedWorkers, controller: Controller) -> None:
        async def on_step(step_index: int) -> None:
            if step_index in failing_steps:
                failing_steps.discard(step_index)
                damage(controller.components.checkpoints.list_newest_first()[0])
                run.learner.die()

        run.learner.on_step = on_step

    run.prepare = prepare


def remove_learner_state(checkpoint: Path) -> None:
    remove(checkpoint / "learner" / "steps.json")


@pytest.mark.slow
async def test_restart_after_a_lost_learner_skips_a_damaged_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path)
    kill_learner_in_step(run, 7, remove_learner_state)
    state = await run.train()
    assert (state.step, state.learner_restarts, run.learner.num_restarts) == (12, 1, 1)
    assert "step-00000006' cannot be read" in caplog.text
    assert "training continues from the checkpoint of step 3" in caplog.text
    assert [row.step for row in run.rows] == list(range(1, 13)), "a step is missing or repeated"
    assert len(set(run.trained_indices)) == len(run.trained_indices) == 4 * 12


@pytest.mark.slow
async def test_checkpoint_that_cannot_be_loaded_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path)
    kill_learner_in_step(run, 7, lambda checkpoint: None)
    restart = run.learner.restart

    async def restart_or_refuse(folder: Path | None) -> None:
        if folder is not None and "step-00000006" in str(folder):
            raise CheckpointError("checkpoint 6 cannot be read: bad checksum")
        await restart(folder)

    monkeypatch.setattr(run.learner, "restart", restart_or_refuse)
    state = await run.train()
    assert state.step == 12
    assert "training continues from the checkpoint of step 3" in caplog.text


async def test_run_without_readable_checkpoint_does_not_restart(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, keep_checkpoints=1)
    kill_learner_in_step(run, 4, remove_learner_state)
    with pytest.raises(CheckpointError, match="step-00000003' cannot be read"):
        await run.train()


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_list_with_an_impossible_name_is_reported(tmp_path: Path, name: str) -> None:
    file_list = {"num_bytes": {name: 1}, "blake3": {name: ""}}
    (tmp_path / "files.json").write_text(json.dumps(file_list))
    with pytest.raises(CheckpointError, match="is missing"):
        check_complete(tmp_path)


@pytest.mark.parametrize("name", ["files.json", "state.json"])
def test_pipe_in_the_place_of_a_file_is_reported(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"'{name}' is not a file"):
        if name == "files.json":
            check_complete(tmp_path)
        else:
            read_state(tmp_path, SavedState)
