"""The verdict of a soak: one table for people, one JSON for the repository."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from machine import setting

from tests.soak.members import Lifetime
from tests.soak.memory import AT_REST_MIB, MIN_SAMPLES, Trend, above_median, fit_trend
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
        named = [
            *((life.member, life) for member in soak.fleet.long_lived for life in member.lifetimes),
            *((f"{server.member} fork server", server) for server in soak.fork_servers.values()),
        ]
        self._lives = {
            f"{name} ({life.pid})": life for name, life in named if len(life.samples) >= MIN_SAMPLES
        }
        self.trends = {name: fit_trends(life) for name, life in self._lives.items()}
        """Trends by process and series, of processes that lived long enough."""

    @property
    def growing(self) -> list[str]:
        """Return the series that are not flat."""
        return [
            f"{name}: {series} {trend.per_hour:+.2f} an hour"
            f" ({trend.low:+.2f} to {trend.high:+.2f}), noise {trend.noise:.3f}"
            for name, trends in self.trends.items()
            for series, trend in trends.items()
            if not trend.is_flat
        ]

    @property
    def holding(self) -> list[str]:
        """Return the processes that keep memory after all sessions have ended."""
        above = {
            name: above_median(np.array([sample.uss_mib for sample in life.samples]))
            for name, life in self._lives.items()
        }
        return [
            f"{name}: holds {mib:.1f} MiB more at the end than mostly before"
            for name, mib in above.items()
            if mib > AT_REST_MIB
        ]

    @property
    def has_passed(self) -> bool:
        """True if the soak passed."""
        book = self._soak.book
        return not (book.violations or book.unexplained_losses() or self.growing or self.holding)

    def lines(self) -> list[str]:
        """Return the table."""
        soak, book = self._soak, self._soak.book
        counts = soak.counts
        kinds = Counter(fault.kind.partition(":")[0] for fault in book.faults)
        rows = [
            ("faults", f"{len(book.faults)} in {soak.fault_s / 60:.1f} minutes"),
            *((f"  {kind}", str(num)) for kind, num in sorted(kinds.items())),
            ("sessions opened", f"{counts['opened']:,}"),
            ("steps verified", f"{counts['steps']:,}"),
            ("came to their own end", f"{counts['came to their end']:,}"),
            (
                "ended by a fault that hit them",
                f"{len(book.lost) - len(book.unexplained_losses())}",
            ),
            ("ended, and not hit", str(len(book.unexplained_losses()))),
            ("wrong answers, places left over, other violations", str(len(book.violations))),
            ("exact counts of all places", str(soak.num_counts + 1)),
        ]
        table = [f"{name:52}{value:>16}" for name, value in rows]
        table += ["", f"{'memory, second half of the life':36}{'MiB':>8}{'MiB/hour':>10}  95 %"]
        for name, trends in self.trends.items():
            trend, mean = trends["uss_mib"], _by_minute(self._lives[name])[-1]
            interval = f"{trend.low:+8.2f} to {trend.high:+.2f}"
            table.append(
                f"{name:36}{mean:8.1f}{trend.per_hour:+10.2f}  {interval}"
                f"  {'flat' if trend.is_flat else 'GROWS'}"
            )
        table += [*self.growing, *self.holding]
        table += [f"not hit: {loss}" for loss in book.unexplained_losses()[:20]]
        table += [f"violation: {violation}" for violation in book.violations[:40]]
        return [*table, "PASSED" if self.has_passed else "FAILED"]

    def write(self, path: Path) -> None:
        """Write the result."""
        path.write_text(json.dumps(self._result(), indent=1) + "\n")

    def _result(self) -> dict[str, Any]:
        soak, book = self._soak, self._soak.book
        begun_s = book.faults[0].begun_s if book.faults else 0.0
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
            "num_faults": dict(sorted(Counter(fault.kind for fault in book.faults).items())),
            "num_lost": len(book.lost),
            "lost_by_fault": dict(sorted(book.losses_by_fault().items())),
            "lost_and_not_hit": [str(loss) for loss in book.unexplained_losses()],
            "violations": book.violations,
            "exact_counts": soak.num_counts + 1,
            "memory_per_hour": {
                name: {series: _trend_json(trend) for series, trend in trends.items()}
                for name, trends in self.trends.items()
            },
            "uss_mib_by_minute": {
                name: " ".join(f"{mib:.1f}" for mib in _by_minute(life))
                for name, life in self._lives.items()
            },
            "faults": [
                f"{fault.begun_s - begun_s:.1f} s {fault.kind}: {fault.target} ({fault.outcome})"
                for fault in book.faults
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


def _by_minute(life: Lifetime) -> list[float]:
    """Return the mean of each minute of a process's life."""
    minutes: dict[int, list[float]] = {}
    for sample in life.samples:
        minutes.setdefault(int((sample.at_s - life.begun_s) / 60), []).append(sample.uss_mib)
    return [float(np.mean(values)) for values in minutes.values()]


def _trend_json(trend: Trend) -> dict[str, float | bool]:
    return {
        "per_hour": round(trend.per_hour, 3),
        "low": round(trend.low, 3),
        "high": round(trend.high, 3),
        "noise": round(trend.noise, 4),
        "window_s": round(trend.window_s),
        "is_flat": trend.is_flat,
    }
