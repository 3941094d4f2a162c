"""Draws docs/images/autoscaling.svg: a recorded run of tests/cluster/test_autoscaling.py.

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

from autoscaler import Autoscaler, replayed
from grafana import drawing
from grafana.drawing import Box, Series, Span
from grafana.model import Panel

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "cluster" / "autoscaling.json"
TARGET = ROOT / "docs" / "images" / "autoscaling.svg"
RECORDED_SYNC_S = 5
"""The --horizontal-pod-autoscaler-sync-period of the cluster of the recorded run."""
_WIDTH, _HEIGHT = 900, 260


@dataclass(frozen=True)
class Recording:
    """What was seen in each second, by name; a second that nobody saw is as the one before."""

    scaled_object: Mapping[str, Any]
    seconds: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Recording:
        """As the test has written it."""
        rows = {round(row[0]): row for row in said["seconds"]}
        row, filled = said["seconds"][0], []
        for second in range(max(rows) + 1):
            row = rows.get(second, row)
            filled.append(row)
        columns = zip(*filled, strict=True)
        return cls(said["scaled_object"], dict(zip(said["columns"], columns, strict=True)))

    @property
    def wanted(self) -> list[float]:
        """Sessions to provide for."""
        pairs = zip(self.seconds["active"], self.seconds["pending"], strict=True)
        return [active + pending for active, pending in pairs]

    def simulated(self, scaled_object: Mapping[str, Any], phase_s: int = 0) -> list[int]:
        """The pods that the simulation wants in each second of the same demand."""
        first = int(self.seconds["replicas"][0])
        scaler = Autoscaler(dict(scaled_object), first, RECORDED_SYNC_S)
        return replayed(scaler, self.wanted, phase_s)


def draw(recording: Recording) -> str:
    """Sessions, and below them pods."""
    seen = recording.seconds
    panels = {
        "Sessions": {
            "on pods that take new ones": seen["active"],
            "waiting in the gateway": seen["pending"],
            "on pods that drain": seen["draining"],
        },
        "Pods": {
            "wanted by KEDA and the HPA": seen["replicas"],
            "ready": seen["ready"],
            "wanted by the simulation": recording.simulated(recording.scaled_object),
        },
    }
    span = Span(0.0, float(len(recording.wanted) - 1))
    parts = []
    for number, (title, lines) in enumerate(panels.items()):
        box = Box(0, number * _HEIGHT, _WIDTH, _HEIGHT)
        series = [Series(name, _steps(values), {}) for name, values in lines.items()]
        shown = Panel(title, "", (), "", min=0)
        parts.append(drawing.draw_panel(shown, title, series, box, span))
    title = "Pods follow sessions, from zero and back"
    return drawing.draw_page(title, Box(0, 0, _WIDTH, len(panels) * _HEIGHT), parts)


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """A line that turns where a value changes."""
    points = [(0.0, values[0])]
    for second, (before, value) in enumerate(itertools.pairwise(values), start=1):
        if value != before:
            points += [(float(second), before), (float(second), value)]
    return [*points, (float(len(values) - 1), values[-1])]


def main() -> None:
    """Draw the run that is named, or the one that is kept."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED
    recording = Recording.of(json.loads(path.read_text(encoding="utf-8")))
    TARGET.write_text(draw(recording), encoding="utf-8")


if __name__ == "__main__":
    main()
