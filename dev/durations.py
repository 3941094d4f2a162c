"""Compare how long each test took with the recorded durations, or record them.

    python dev/durations.py check test    fails if a test takes half as long again, and 10 s longer
    python dev/durations.py record        writes tests/durations.json from both reports

`make test` leaves its report in .cache/tests.xml, `make test-long` in .cache/tests-long.xml. Only
recorded tests, of 3 s and more, are compared; a slow test without a record is named. Only the call
counts, because the first test of a process also starts its servers. The median ratio of all tests
stands for the speed of a slower machine. A test that exceeds its limit runs twice more, alone,
before it fails: other processes may have delayed it.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT_FILES = {
    "test": ROOT / ".cache" / "tests.xml",
    "test-long": ROOT / ".cache" / "tests-long.xml",
}
"""The report of each make target."""
RECORD_FILE = ROOT / "tests" / "durations.json"
MIN_RECORDED_S = 3.0
MAX_GROWTH = 1.5
MIN_GROWTH_S = 10.0
MAX_RERUNS = 2
MAX_UNRECORDED_S = 30.0


def read_report(path: Path) -> dict[str, float]:
    """Return the seconds of each passed test in a JUnit report, by node id."""
    durations = {}
    for case in ET.parse(path).iter("testcase"):
        if list(case):  # skipped, failed
            continue
        node_id = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        durations[node_id] = float(case.attrib["time"])
    return durations


def find_slowed(
    durations: Mapping[str, float], records: Mapping[str, float], slowdown: float
) -> dict[str, float]:
    """Return the limit in seconds of each test that exceeds it.

    Args:
        durations: the seconds of each test of this run.
        records: the recorded seconds.
        slowdown: the time that this machine takes for what the recording machine did in 1 s.
    """
    limits = {
        test: max(records[test] * slowdown * MAX_GROWTH, records[test] * slowdown + MIN_GROWTH_S)
        for test in durations
        if test in records
    }
    return {test: limit for test, limit in limits.items() if durations[test] > limit}


def find_unrecorded(durations: Mapping[str, float], records: Mapping[str, float]) -> list[str]:
    """Return the slow tests without a recorded duration."""
    return [
        test
        for test, seconds in durations.items()
        if test not in records and seconds > MAX_UNRECORDED_S
    ]


def measure_slowdown(durations: Mapping[str, float], records: Mapping[str, float]) -> float:
    """Return the median ratio of measured to recorded seconds, at least 1.0."""
    ratios = [durations[test] / seconds for test, seconds in records.items() if test in durations]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def check(report_file: Path) -> int:
    """Compare a report with the record; return the exit status."""
    records = json.loads(RECORD_FILE.read_text(encoding="utf-8"))
    durations = read_report(report_file)
    slowdown = measure_slowdown(durations, records)
    exceeded_limits = find_slowed(durations, records, slowdown)
    for test in find_unrecorded(durations, records):
        print(f"{test} took {durations[test]:.1f} s and has no recorded duration")
    status = 0
    for test, limit in exceeded_limits.items():
        print(f"{test} took {durations[test]:.1f} s, limit {limit:.1f} s; running it alone")
        reruns = [time_alone(test) for _ in range(MAX_RERUNS)]
        print(f"{test} took", " and ".join(f"{seconds:.1f} s" for seconds in reruns), "alone")
        if min(reruns) > limit:
            status = 1
            print(
                f"error: {test} exceeds its limit of {limit:.1f} s; make it faster, or record the "
                "new duration: python dev/durations.py record"
            )
    return status


def time_alone(test: str) -> float:
    """Run one test in a separate process; return its seconds, infinite if it fails."""
    report = ROOT / ".cache" / "alone.xml"
    command = [sys.executable, "-m", "pytest", f"--junit-xml={report}", test]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode != 0:
        return math.inf
    return read_report(report)[test]


def record() -> int:
    """Write the durations of the last reports."""
    measured = {
        test: seconds
        for file in REPORT_FILES.values()
        for test, seconds in read_report(file).items()
    }
    durations = {
        test: round(seconds, 1)
        for test, seconds in sorted(measured.items())
        if seconds >= MIN_RECORDED_S
    }
    RECORD_FILE.write_text(json.dumps(durations, indent=1) + "\n", encoding="utf-8")
    print(f"{len(durations)} tests of {MIN_RECORDED_S:.0f} s and more recorded in {RECORD_FILE}")
    return 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", ("test" | "test-long") as target]:
            sys.exit(check(REPORT_FILES[target]))
        case ["record"]:
            sys.exit(record())
        case _:
            sys.exit("usage: python dev/durations.py check test|test-long, or record")
