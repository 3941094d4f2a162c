"""What the user wants changed while a run continues: `ludus scale` writes it, the driver reads it.

    ludus scale --> control.json --(each second)--> `follow` --> RolloutWorkers.resize

The file says what is wanted, not what to do: it may be written again, and holds when a stopped
run is resumed.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pydantic import ValidationError

from ludus.proto.runs import CONTROL_FILE, RunControl
from ludus.trainer.processes import Workers

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0


async def follow(run_folder: Path, workers: Workers) -> None:
    """Do what the control file of the run says, for ever, each time that it changes.

    A file that cannot be read is named in the log and changes nothing.
    """
    path = run_folder / CONTROL_FILE
    before: str | None = None
    while True:
        text = await asyncio.to_thread(_read, path)
        if text is not None and text != before:
            before = text
            _apply(text, path, workers)
        await asyncio.sleep(_INTERVAL_S)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        # Mostly there is none; one that cannot be read says nothing yet.
        return None


def _apply(text: str, path: Path, workers: Workers) -> None:
    try:
        wanted = RunControl.model_validate_json(text)
    except ValidationError as error:
        _log.warning("'%s' changes nothing: %s", path, error)
        return
    if wanted.num_workers is not None:
        _log.info("%d rollout workers are wanted", wanted.num_workers)
        workers.resize(wanted.num_workers)
