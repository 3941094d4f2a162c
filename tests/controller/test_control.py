"""What the user wants changed while a run continues reaches it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ludus.proto.runs import CONTROL_FILE, CONTROL_VARIABLE, RunControl
from ludus.trainer.run import control
from tests.env.polling import eventually


class Followed:
    """A run that notes what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / CONTROL_FILE
        self.sizes: list[int] = []
        self.num_stops = 0
        self.workers: Any = SimpleNamespace(resize=self.sizes.append)

    def stop(self) -> None:
        self.num_stops += 1


@asynccontextmanager
async def followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(control, "_INTERVAL_S", 0.01)
    run = Followed(folder)
    task = asyncio.create_task(control.follow(folder, run.workers.resize, run.stop))
    yield run
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_wish_is_done_once_each_time_that_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with followed(tmp_path, monkeypatch) as run:
        run.file.write_text(RunControl(num_workers=3).model_dump_json())
        await eventually(lambda: run.sizes == [3])
        run.file.write_text(RunControl(num_workers=2, stop=True).model_dump_json())
        await eventually(lambda: run.num_stops == 1)
        await asyncio.sleep(0.05)
        assert (run.sizes, run.num_stops) == ([3, 2], 1)


async def test_a_file_that_is_mounted_into_the_pod_is_followed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = tmp_path / "etc" / "control.json"
    monkeypatch.setenv(CONTROL_VARIABLE, str(mounted))
    async with followed(tmp_path, monkeypatch) as run:
        mounted.parent.mkdir()
        mounted.write_text(RunControl(stop=True).model_dump_json())
        await eventually(lambda: run.num_stops == 1)


async def test_a_file_that_cannot_be_read_changes_nothing_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / CONTROL_FILE).write_text('{"stop": "perhaps"}')
    with caplog.at_level(logging.WARNING):
        async with followed(tmp_path, monkeypatch) as run:
            await eventually(lambda: str(run.file) in caplog.text)
            assert (run.sizes, run.num_stops) == ([], 0)
