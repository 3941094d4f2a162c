"""Write charts/ludus/dashboards from dev/grafana, or check the existing files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from grafana.fleet import FLEET
from grafana.overview import OVERVIEW
from grafana.throughput import THROUGHPUT
from grafana.training import TRAINING

TARGET = Path(__file__).parent.parent / "charts" / "ludus" / "dashboards"
DASHBOARDS = (OVERVIEW, TRAINING, FLEET, THROUGHPUT)


def render_files() -> dict[Path, str]:
    """Return the contents of each file."""
    return {
        TARGET / f"{dashboard.uid}.json": json.dumps(dashboard.to_json(), indent=1) + "\n"
        for dashboard in DASHBOARDS
    }


def find_stale_files() -> list[str]:
    """Return the names of files that differ, are missing or are superfluous."""
    texts = render_files()
    paths = set(TARGET.glob("*.json"))
    changed_paths = {
        path for path in paths & texts.keys() if path.read_text("utf-8") != texts[path]
    }
    return sorted(path.name for path in changed_paths | (paths ^ texts.keys()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; exit with 1 if a file differs."
    )
    if parser.parse_args().check:
        if stale_files := find_stale_files():
            sys.exit(f"{', '.join(stale_files)} in {TARGET} differ; run dev/dashboards.py")
    else:
        TARGET.mkdir(parents=True, exist_ok=True)
        for path in set(TARGET.glob("*.json")) - render_files().keys():
            path.unlink()
        for path, text in render_files().items():
            path.write_text(text, encoding="utf-8")
