"""Writes charts/ludus/dashboards from dev/grafana, or checks what is there."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from grafana.fleet import FLEET
from grafana.model import Dashboard
from grafana.overview import OVERVIEW
from grafana.throughput import THROUGHPUT
from grafana.training import TRAINING

TARGET = Path(__file__).parent.parent / "charts" / "ludus" / "dashboards"
DASHBOARDS = (OVERVIEW, TRAINING, FLEET, THROUGHPUT)


def files() -> dict[Path, str]:
    """What each file is to hold."""
    return {TARGET / f"{dashboard.uid}.json": _text(dashboard) for dashboard in DASHBOARDS}


def stale() -> list[str]:
    """The names of the files that hold something else, are missing, or are too many."""
    wanted = files()
    there = set(TARGET.glob("*.json"))
    differ = {path for path in there & wanted.keys() if path.read_text("utf-8") != wanted[path]}
    return sorted(path.name for path in differ | (there ^ wanted.keys()))


def _text(dashboard: Dashboard) -> str:
    return json.dumps(dashboard.json(), indent=1) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on drift")
    if parser.parse_args().check:
        if found := stale():
            sys.exit(f"{', '.join(found)} in {TARGET} differ; run dev/dashboards.py")
    else:
        TARGET.mkdir(parents=True, exist_ok=True)
        for path in set(TARGET.glob("*.json")) - files().keys():
            path.unlink()
        for path, text in files().items():
            path.write_text(text, encoding="utf-8")
