"""What the user wants changed while a run continues, and the driver's reading of it.

    ludus scale --> control.json of the run's folder -------+--(each second)--> `follow`
    the same in a cluster --> a ConfigMap, as a mounted file +    --> resize workers, stop

A file says what is wanted, not what to do: it may be written again, and holds when a stopped
run is resumed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from ludus.proto.runs import CONTROL_FILE, CONTROL_VARIABLE, RunControl

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0


async def follow(run_folder: Path, resize: Callable[[int], None], stop: Callable[[], None]) -> None:
    """Do what the control files of the run say, for ever, each time that one changes.

    A file that cannot be read is named in the log and changes nothing.
    """
    mounted = os.environ.get(CONTROL_VARIABLE)
    paths = [run_folder / CONTROL_FILE, *([Path(mounted)] if mounted else [])]
    before: dict[Path, str] = {}
    while True:
        for path in paths:
            text = await asyncio.to_thread(_read, path)
            if text is not None and text != before.get(path):
                before[path] = text
                _apply(text, path, resize, stop)
        await asyncio.sleep(_INTERVAL_S)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        # Mostly there is none; one that cannot be read says nothing yet.
        return None


def _apply(text: str, path: Path, resize: Callable[[int], None], stop: Callable[[], None]) -> None:
    try:
        wanted = RunControl.model_validate_json(text)
    except ValidationError as error:
        _log.warning("'%s' changes nothing: %s", path, error)
        return
    if wanted.num_workers is not None:
        _log.info("%d rollout workers are wanted", wanted.num_workers)
        resize(wanted.num_workers)
    if wanted.stop:
        _log.info("an end after this step is wanted")
        stop()
