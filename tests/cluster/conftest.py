"""The long forms, which `make cluster-test ARGS=--all` adds: tests marked `long`.

How each test of the cluster ended, on which commit and after how long, goes to
runs/cluster-test/results.json beside what is known of the others. A copy lies beside this file.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.installed import (
    AUTOSCALING_VALUES,
    ROOT,
    Installed,
    installed,
    kubectl,
    why_not,
)
from tests.cluster.prometheus import is_there

RESULTS = ROOT / "runs" / "cluster-test" / "results.json"
_ended: dict[str, dict[str, object]] = {}
_seconds: dict[str, float] = {}
"""Since the test's own fixtures began."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --all."""
    parser.addoption("--all", action="store_true", help="run the long forms of cluster tests, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long forms unless they were asked for; what was installed first comes last."""
    items.sort(key=is_autoscaled)
    if not config.getoption("--all", default=False):
        reason = "a long form; `make cluster-test ARGS=--all`"
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def autoscaled() -> Iterator[Installed]:
    """A release that KEDA scales by what Prometheus says."""
    if not has_keda():
        pytest.skip("SKIPPED, NOT PASSED: KEDA or the Prometheus operator is not installed")
    with installed(AUTOSCALING_VALUES) as release:
        yield release


@pytest.fixture(scope="session", autouse=True)
def installed_first(request: pytest.FixtureRequest) -> None:
    """Install the one that is tested last: Prometheus finds a release after two minutes."""
    items = filter(is_autoscaled, request.session.items)
    is_wanted = any(item.get_closest_marker("skip") is None for item in items)
    if is_wanted and not why_not() and has_keda():
        request.getfixturevalue("autoscaled")


def has_keda() -> bool:
    """Whether the cluster has what autoscaling by sessions needs."""
    return "scaledobjects.keda.sh" in kubectl("get", "crd", "-o", "name") and is_there()


def is_autoscaled(item: pytest.Item) -> bool:
    """Whether a test needs the release that KEDA scales."""
    return "autoscaled" in getattr(item, "fixturenames", ())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how a test ended, and after how long; one that was skipped did not."""
    if "tests/cluster/" not in report.nodeid:
        return
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.failed or (report.passed and report.when == "call"):
        seconds = round(_seconds[report.nodeid], 1)
        _ended[report.nodeid] = {"outcome": report.outcome, "seconds": seconds}


def pytest_sessionfinish() -> None:
    """Write it down."""
    if not _ended or not os.environ.get("KUBECONFIG"):
        return
    head = ("git", "describe", "--always", "--dirty")
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    known |= {name: end | {"commit": commit} for name, end in _ended.items()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
