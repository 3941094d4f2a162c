"""Where a benchmark ran: what its numbers are worth elsewhere depends on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ludus.trainer.summary import installed_versions


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


def _cpu_model() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()
