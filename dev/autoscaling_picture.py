"""Draw docs/images/autoscaling.svg from a recorded run of tests/cluster/test_autoscaling.py.

.venv/bin/python dev/autoscaling_picture.py [runs/cluster-test/autoscaling.json]
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaler import Autoscaler, simulate_demand
from grafana import drawing
from grafana.drawing import Box, Series, Span
from grafana.model import Panel

ROOT = Path(__file__).parents[1]
RECORDED_RUN_FILE = ROOT / "tests" / "cluster" / "autoscaling.json"
TARGET = ROOT / "docs" / "images" / "autoscaling.svg"
RECORDED_SYNC_S = 5
"""The --horizontal-pod-autoscaler-sync-period of the cluster of the recorded run."""
_WIDTH, _HEIGHT = 900, 260


@dataclass(frozen=True)
class Recording:
    """Observed values of each second by name; a missing second repeats the previous values."""

    scaled_object: Mapping[str, Any]
    seconds: Mapping[str, Sequence[float]]

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Recording:
        """Parse the content of the test's file."""
        rows = {round(row[0]): row for row in content["seconds"]}
        row, filled_rows = content["seconds"][0], []
        for second in range(max(rows) + 1):
            row = rows.get(second, row)
            filled_rows.append(row)
        columns = zip(*filled_rows, strict=True)
        return cls(content["scaled_object"], dict(zip(content["columns"], columns, strict=True)))

    @property
    def num_sessions(self) -> list[float]:
        """Active and waiting sessions in each second."""
        pairs = zip(self.seconds["active"], self.seconds["pending"], strict=True)
        return [active + pending for active, pending in pairs]

    def simulate(self, scaled_object: Mapping[str, Any], phase_s: int = 0) -> list[int]:
        """Return the simulated number of pods in each second of the same demand."""
        initial_replicas = int(self.seconds["replicas"][0])
        scaler = Autoscaler(dict(scaled_object), initial_replicas, RECORDED_SYNC_S)
        return simulate_demand(scaler, self.num_sessions, phase_s)


def draw(recording: Recording) -> str:
    """Return the picture: sessions above, pods below."""
    seconds = recording.seconds
    panels = {
        "Sessions": {
            "on pods that take new ones": seconds["active"],
            "waiting in the gateway": seconds["pending"],
            "on pods that drain": seconds["draining"],
        },
        "Pods": {
            "wanted by KEDA and the HPA": seconds["replicas"],
            "ready": seconds["ready"],
            "wanted by the simulation": recording.simulate(recording.scaled_object),
        },
    }
    span = Span(0.0, float(len(recording.num_sessions) - 1))
    parts = []
    for index, (title, curves) in enumerate(panels.items()):
        box = Box(0, index * _HEIGHT, _WIDTH, _HEIGHT)
        series = [Series(name, _make_step_line(values), {}) for name, values in curves.items()]
        panel = Panel(title, "", (), "", min=0)
        parts.append(drawing.draw_panel(panel, title, series, box, span))
    title = "Pods follow sessions, from zero and back"
    return drawing.draw_page(title, Box(0, 0, _WIDTH, len(panels) * _HEIGHT), parts)


def _make_step_line(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the points of a step line."""
    points = [(0.0, values[0])]
    for second, (previous_value, value) in enumerate(itertools.pairwise(values), start=1):
        if value != previous_value:
            points += [(float(second), previous_value), (float(second), value)]
    return [*points, (float(len(values) - 1), values[-1])]


def main() -> None:
    """Draw the run of the command line; default: the recorded run of the repository."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED_RUN_FILE
    recording = Recording.parse(json.loads(path.read_text(encoding="utf-8")))
    TARGET.write_text(draw(recording), encoding="utf-8")


if __name__ == "__main__":
    main()
