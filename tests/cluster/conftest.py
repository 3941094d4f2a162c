"""Pytest hooks and fixtures of the cluster tests.

`make cluster-test ARGS=--all` also runs the tests marked `long`. The outcome, commit and duration
of each test are added to runs/cluster-test/results.json. tests/cluster/results.json is a copy.
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
    Release,
    find_skip_reason,
    install,
    kubectl,
)
from tests.cluster.prometheus import has_prometheus

RESULTS_PATH = ROOT / "runs" / "cluster-test" / "results.json"
_outcomes: dict[str, dict[str, object]] = {}
_durations_s: dict[str, float] = {}
"""Duration of each test in seconds, including fixtures."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --all."""
    parser.addoption("--all", action="store_true", help="also run cluster tests marked `long`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip long tests of clusters unless --all is set; run those of the autoscaled release last."""
    items.sort(key=needs_autoscaled_release)
    if not config.getoption("--all", default=False):
        reason = "long test; run it with `make cluster-test ARGS=--all`"
        for item in items:
            if item.get_closest_marker("long") and item.get_closest_marker("cluster"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def autoscaled_release() -> Iterator[Release]:
    """Install a release whose environments KEDA scales by Prometheus metrics."""
    if not has_keda():
        pytest.skip("SKIPPED, NOT PASSED: KEDA or the Prometheus operator is not installed")
    with install(AUTOSCALING_VALUES) as release:
        yield release


@pytest.fixture(scope="session", autouse=True)
def install_autoscaled_release_first(request: pytest.FixtureRequest) -> None:
    """Install the autoscaled release first, because Prometheus needs two minutes to discover it."""
    items = filter(needs_autoscaled_release, request.session.items)
    is_needed = any(item.get_closest_marker("skip") is None for item in items)
    if is_needed and not find_skip_reason() and has_keda():
        request.getfixturevalue("autoscaled_release")


def has_keda() -> bool:
    """Return True if the cluster has KEDA and the Prometheus operator."""
    return "scaledobjects.keda.sh" in kubectl("get", "crd", "-o", "name") and has_prometheus()


def needs_autoscaled_release(item: pytest.Item) -> bool:
    """Return True if a test uses the fixture autoscaled_release."""
    return "autoscaled_release" in getattr(item, "fixturenames", ())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome and duration of a test, unless it was skipped."""
    if "tests/cluster/" not in report.nodeid:
        return
    _durations_s[report.nodeid] = _durations_s.get(report.nodeid, 0.0) + report.duration
    if report.failed or (report.passed and report.when == "call"):
        duration_s = round(_durations_s[report.nodeid], 1)
        _outcomes[report.nodeid] = {"outcome": report.outcome, "seconds": duration_s}


def pytest_sessionfinish() -> None:
    """Write the outcomes to the results file."""
    if not _outcomes or not os.environ.get("KUBECONFIG"):
        return
    git_command = ("git", "describe", "--always", "--dirty")
    commit = subprocess.run(git_command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    results = json.loads(RESULTS_PATH.read_text(encoding="utf-8")) if RESULTS_PATH.exists() else {}
    results |= {name: outcome | {"commit": commit} for name, outcome in _outcomes.items()}
    RESULTS_PATH.parent.mkdir(parents=True, exist_ok=True)
    RESULTS_PATH.write_text(
        json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8"
    )
