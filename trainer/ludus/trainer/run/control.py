"""The control files of a run, by which the user changes it while it runs.

    ludus scale --> control.json in the run's folder -------+--(once a second)--> `follow_control`
    in a cluster --> a ConfigMap, mounted as a file --------+    --> resize the workers, or stop

A control file states the desired state, not a command. It may be rewritten, and it still applies
when a stopped run resumes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from ludus.proto.runs import CONTROL_FILE, CONTROL_VARIABLE, RunControl
from ludus.trainer.core.stopping import StopRequest

_log = logging.getLogger(__name__)


async def follow_control(
    run_folder: Path,
    resize: Callable[[int], None],
    stop_request: StopRequest,
    *,
    interval_s: float = 1.0,
) -> None:
    """Apply the control files of a run whenever they change, until cancelled.

    A file that cannot be parsed is logged and changes nothing.
    """
    mounted_path = os.environ.get(CONTROL_VARIABLE)
    paths = [run_folder / CONTROL_FILE, *([Path(mounted_path)] if mounted_path else [])]
    texts: dict[Path, str] = {}
    while True:
        for path in paths:
            text = await asyncio.to_thread(_read_text, path)
            if text is not None and text != texts.get(path):
                texts[path] = text
                _apply(text, path, resize, stop_request)
        await asyncio.sleep(interval_s)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None  # usually there is no such file


def _apply(text: str, path: Path, resize: Callable[[int], None], stop_request: StopRequest) -> None:
    try:
        control = RunControl.model_validate_json(text)
    except ValidationError as error:
        _log.warning("'%s' is ignored: %s", path, error)
        return
    if control.num_workers is not None:
        _log.info("the control file requests %d rollout workers", control.num_workers)
        resize(control.num_workers)
    if control.stop:
        _log.info("the control file requests a stop after this step")
        stop_request.set(from_control_file=True)
