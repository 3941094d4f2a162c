"""Control files resize or stop a run in progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ludus.proto.runs import CONTROL_FILE, CONTROL_VARIABLE, RunControl
from ludus.trainer.core.stopping import StopRequest
from ludus.trainer.run.lifecycle import apply_control_files
from tests.env.polling import wait_until


class ControlledRun:
    """A control file and the requests that a run reads from it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / CONTROL_FILE
        self.requested_sizes: list[int] = []
        self.stop_request = StopRequest()


@asynccontextmanager
async def follow_control_files(folder: Path) -> AsyncIterator[ControlledRun]:
    run = ControlledRun(folder)
    task = asyncio.create_task(
        apply_control_files(folder, run.requested_sizes.append, run.stop_request, interval_s=0.01)
    )
    yield run
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_each_change_of_the_file_is_applied_once(tmp_path: Path) -> None:
    async with follow_control_files(tmp_path) as run:
        run.file.write_text(RunControl(num_workers=3).model_dump_json())
        await wait_until(lambda: run.requested_sizes == [3])
        run.file.write_text(RunControl(num_workers=2, stop=True).model_dump_json())
        await wait_until(lambda: run.stop_request.is_set)
        await asyncio.sleep(0.05)
        assert run.requested_sizes == [3, 2]
        assert run.stop_request.is_from_control_file


async def test_file_mounted_into_the_pod_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted_file = tmp_path / "etc" / "control.json"
    monkeypatch.setenv(CONTROL_VARIABLE, str(mounted_file))
    async with follow_control_files(tmp_path) as run:
        mounted_file.parent.mkdir()
        mounted_file.write_text(RunControl(stop=True).model_dump_json())
        await wait_until(lambda: run.stop_request.is_set)


async def test_invalid_file_is_logged_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / CONTROL_FILE).write_text('{"stop": "perhaps"}')
    with caplog.at_level(logging.WARNING):
        async with follow_control_files(tmp_path) as run:
            await wait_until(lambda: str(run.file) in caplog.text)
            assert run.requested_sizes == [] and not run.stop_request.is_set
