"""The verdict of a soak, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from machine import setting

from tests.soak.memory import MAX_REST_MIB, MIN_SAMPLES, Trend, compute_rise_above_median, fit_trend
from tests.soak.processes import Lifetime
from tests.soak.soak import Soak

_SERIES = {
    "uss_mib": lambda sample: sample.uss_mib,
    "files": lambda sample: float(sample.num_files),
    "threads": lambda sample: float(sample.num_threads),
}
_ARENA_MIB = 1.0
"""Size of Python's arenas for small objects."""
_STEPS = {"uss_mib": _ARENA_MIB}


class Verdict:
    """The result of a soak."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak
        named_lifetimes = [
            *(
                (life.name, life)
                for process in soak.fleet.measured_processes
                for life in process.lifetimes
            ),
            *((f"{server.name} fork server", server) for server in soak.fork_servers.values()),
        ]
        self._lives = {
            f"{name} ({life.pid})": life
            for name, life in named_lifetimes
            if len(life.samples) >= MIN_SAMPLES
        }
        self.trends = {name: fit_trends(life) for name, life in self._lives.items()}
        """Trends by process and series, for processes with enough samples."""

    @property
    def growing_series(self) -> list[str]:
        """Series that are not flat."""
        return [
            f"{name}: {series} {trend.per_hour:+.2f} per hour"
            f" ({trend.low:+.2f} to {trend.high:+.2f}), noise {trend.noise:.3f}"
            for name, trends in self.trends.items()
            for series, trend in trends.items()
            if not trend.is_flat
        ]

    @property
    def retained_memory(self) -> list[str]:
        """Processes that retain memory after all sessions have ended."""
        rises_mib = {
            name: compute_rise_above_median(np.array([sample.uss_mib for sample in life.samples]))
            for name, life in self._lives.items()
        }
        return [
            f"{name}: {mib:.1f} MiB above the median after all sessions have ended"
            for name, mib in rises_mib.items()
            if mib > MAX_REST_MIB
        ]

    @property
    def has_passed(self) -> bool:
        """True if the soak passed."""
        record = self._soak.record
        return not (
            record.violations
            or record.find_unexplained_losses()
            or self.growing_series
            or self.retained_memory
        )

    def make_lines(self) -> list[str]:
        """Return the lines of the table."""
        soak, record = self._soak, self._soak.record
        counts = soak.counts
        kinds = Counter(fault.kind.partition(":")[0] for fault in record.faults)
        rows = [
            ("faults", f"{len(record.faults)} in {soak.fault_s / 60:.1f} minutes"),
            *((f"  {kind}", str(num)) for kind, num in sorted(kinds.items())),
            ("sessions opened", f"{counts['opened']:,}"),
            ("steps verified", f"{counts['steps']:,}"),
            ("sessions ended normally", f"{counts['came to their end']:,}"),
            (
                "sessions lost because of a fault",
                f"{len(record.lost) - len(record.find_unexplained_losses())}",
            ),
            ("sessions lost without a fault", str(len(record.find_unexplained_losses()))),
            ("violations: wrong results, occupied slots, others", str(len(record.violations))),
            ("exact comparisons of all slots", str(soak.num_counts + 1)),
        ]
        table = [f"{name:52}{value:>16}" for name, value in rows]
        table += ["", f"{'memory, second half of the lifetime':36}{'MiB':>8}{'MiB/hour':>10}  95 %"]
        for name, trends in self.trends.items():
            trend, mean = trends["uss_mib"], _average_by_minute(self._lives[name])[-1]
            interval = f"{trend.low:+8.2f} to {trend.high:+.2f}"
            table.append(
                f"{name:36}{mean:8.1f}{trend.per_hour:+10.2f}  {interval}"
                f"  {'flat' if trend.is_flat else 'GROWS'}"
            )
        table += [*self.growing_series, *self.retained_memory]
        table += [f"lost without a fault: {loss}" for loss in record.find_unexplained_losses()[:20]]
        table += [f"violation: {violation}" for violation in record.violations[:40]]
        return [*table, "PASSED" if self.has_passed else "FAILED"]

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(json.dumps(self._make_result(), indent=1) + "\n")

    def _make_result(self) -> dict[str, Any]:
        soak, record = self._soak, self._soak.record
        started_s = record.faults[0].started_s if record.faults else 0.0
        return {
            "what": "the environment plane under random faults; `make soak`",
            "command": soak.options.command,
            **setting(),
            "load_of_machine": {
                "mean": round(float(np.mean(soak.loads or [0.0])), 2),
                "max": round(max(soak.loads, default=0.0), 2),
            },
            "has_passed": self.has_passed,
            "minutes_of_faults": round(soak.fault_s / 60, 2),
            "sessions_at_once": soak.options.sessions,
            "counts": dict(sorted(soak.counts.items())),
            "num_faults": dict(sorted(Counter(fault.kind for fault in record.faults).items())),
            "num_lost": len(record.lost),
            "lost_by_fault": dict(sorted(record.count_losses_by_fault().items())),
            "lost_and_not_hit": [str(loss) for loss in record.find_unexplained_losses()],
            "violations": record.violations,
            "exact_counts": soak.num_counts + 1,
            "memory_per_hour": {
                name: {series: _make_trend_json(trend) for series, trend in trends.items()}
                for name, trends in self.trends.items()
            },
            "uss_mib_by_minute": {
                name: " ".join(f"{mib:.1f}" for mib in _average_by_minute(life))
                for name, life in self._lives.items()
            },
            "faults": [
                f"{fault.started_s - started_s:.1f} s {fault.kind}: {fault.target}"
                f" ({fault.outcome})"
                for fault in record.faults
            ],
        }


def fit_trends(life: Lifetime) -> dict[str, Trend]:
    """Return the trends of a process."""
    at_s = np.array([sample.at_s for sample in life.samples])
    return {
        name: fit_trend(
            at_s, np.array([value(sample) for sample in life.samples]), step=_STEPS.get(name, 0.0)
        )
        for name, value in _SERIES.items()
    }


def _average_by_minute(life: Lifetime) -> list[float]:
    """Return the mean memory in each minute of a process's lifetime."""
    minutes: dict[int, list[float]] = {}
    for sample in life.samples:
        minutes.setdefault(int((sample.at_s - life.started_s) / 60), []).append(sample.uss_mib)
    return [float(np.mean(values)) for values in minutes.values()]


def _make_trend_json(trend: Trend) -> dict[str, float | bool]:
    return {
        "per_hour": round(trend.per_hour, 3),
        "low": round(trend.low, 3),
        "high": round(trend.high, 3),
        "noise": round(trend.noise, 4),
        "window_s": round(trend.window_s),
        "is_flat": trend.is_flat,
    }
