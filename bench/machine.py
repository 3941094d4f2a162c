"""The machine and package versions of a benchmark, and its file of results."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from ludus.trainer.run.summary import list_installed_versions


def setting() -> dict[str, object]:
    """Return the machine and the package versions that influence a result."""
    return {
        "machine": {
            "cpu": _read_cpu_model(),
            "num_cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": list_installed_versions(),
    }


def machine() -> str:
    """Return a short description of this machine, such as "AMD EPYC, 2 cores"."""
    return f"{_read_cpu_model()}, {len(os.sched_getaffinity(0))} cores"


def read_earlier_runs(results: Path) -> list[dict[str, Any]]:
    """Return the runs in a file of results that used the current package versions.

    The learning result of a run does not depend on the machine, and each run names the machine of
    its times. A long measurement can therefore be split over several calls and machines.
    """
    if not results.exists():
        return []
    earlier = json.loads(results.read_text(encoding="utf-8"))
    return list(earlier["runs"]) if earlier["versions"] == list_installed_versions() else []


def write_runs(results: Path, command: str, runs: list[dict[str, Any]], **fields: object) -> None:
    """Write a file of results that `earlier_runs` reads."""
    content = {"command": command, "versions": list_installed_versions(), **fields, "runs": runs}
    results.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_cpu_model() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()
