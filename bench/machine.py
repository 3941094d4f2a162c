"""Where a benchmark ran: what its numbers are worth elsewhere depends on it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from ludus.trainer.run.summary import installed_versions


def setting() -> dict[str, object]:
    """The machine and the versions of the packages that decide a result."""
    return {
        "machine": {
            "cpu": _cpu_model(),
            "num_cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": installed_versions(),
    }


def machine() -> str:
    """This machine in a few words, for a row of its own: "AMD EPYC, 2 cores"."""
    return f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores"


def earlier_runs(results: Path) -> list[dict[str, Any]]:
    """The runs in a file of results that were measured with the packages of today.

    What a run learns does not depend on the machine, and its seconds name theirs, so a long
    measurement can be made in parts and on several machines.
    """
    if not results.exists():
        return []
    earlier = json.loads(results.read_text(encoding="utf-8"))
    return list(earlier["runs"]) if earlier["versions"] == installed_versions() else []


def write_runs(results: Path, command: str, runs: list[dict[str, Any]], **more: object) -> None:
    """Write a file of results that `earlier_runs` reads."""
    content = {"command": command, "versions": installed_versions(), **more, "runs": runs}
    results.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _cpu_model() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()
