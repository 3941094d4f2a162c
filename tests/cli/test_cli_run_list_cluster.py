"""Runs on a cluster in the list of `ludus runs`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.proto.runs import LOG_ROW_PREFIX
from ludus.services.cli import cluster_run_list
from tests.cli.cluster_runs import append_log, finish_run, start_run
from tests.cli.commands import RunCli
from tests.gateway.fake_kubernetes import Call
from tests.runs.cluster import format_step_line, lose_head

pytestmark = pytest.mark.slow


@pytest.fixture
def local_run(ludus: RunCli, use_fake_trainer: Callable[[str], None]) -> None:
    """Train the run "here" on this machine."""
    use_fake_trainer("succeeds")
    assert ludus("train", "--set", "training.num_steps=3", "--set", "name=here").code == 0


def read_listed_runs(ludus: RunCli, *options: str) -> dict[str, dict[str, Any]]:
    result = ludus("runs", "--json", *options)
    assert (result.code, result.err) == (0, "")
    return {run["name"]: run for run in map(json.loads, result.out.splitlines())}


def format_evaluation_line(step: int, environment: str = "blackjack") -> str:
    values = {"win_rate": 0.5, "win_rate_ci95_low": 0.4, "win_rate_ci95_high": 0.6}
    row = {"kind": "eval", "step": step, "environment": environment, "values": values}
    return LOG_ROW_PREFIX + json.dumps(row | {"elapsed_s": 1.0, "num_games_trained": 1})


def test_one_table_has_the_runs_of_both_places(
    ludus: RunCli, cluster: Call, local_run: None
) -> None:
    start_run(ludus, cluster, format_evaluation_line(1), format_step_line(2))
    lines = [line.split() for line in ludus("runs").out.splitlines() if line.strip()]
    assert lines[0][:2] == ["run", "where"]
    (cluster_line,) = [line for line in lines if line[:2] == ["demo", "cluster"]]
    assert {"running", "2/3", "50.0%", "10.0%"} <= {*cluster_line}
    (local_line,) = [line for line in lines if line[:2] == ["here", "local"]]
    assert {"finished", "3/3"} <= {*local_line}


def test_a_listed_run_on_a_cluster_has_its_environment_model_and_result(
    ludus: RunCli, cluster: Call
) -> None:
    start_run(ludus, cluster, format_evaluation_line(1), format_step_line(2))
    run = read_listed_runs(ludus)["demo"]
    assert (run["location"], run["folder"], run["num_bytes"]) == ("cluster", None, None)
    assert (run["status"], run["step"], run["num_steps"]) == ("running", 2, 3)
    assert (run["environments"], run["model"]) == (["blackjack"], "tiny, width 128")
    result = {"metric": "wins", "value": 0.5, "ci95": [0.4, 0.6], "is_game": True}
    assert run["result"] == result


def test_the_age_is_that_of_the_latest_line_of_the_log(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster, *map(format_step_line, (1, 2)))
    first_s = read_listed_runs(ludus)["demo"]["changed_s"]
    append_log(cluster, *map(format_step_line, range(3, 9)))  # the fake's clock: three a second
    assert read_listed_runs(ludus)["demo"]["changed_s"] - first_s == pytest.approx(2.0, abs=0.1)


def test_a_run_without_pods_is_listed_without_its_step(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster, format_step_line(2))
    finish_run(cluster, endTime="2026-02-03T04:05:06Z")
    cluster(lose_head)
    run = read_listed_runs(ludus)["demo"]
    assert (run["status"], run["step"], run["num_steps"]) == ("succeeded", None, 3)
    assert run["changed_s"] == 1770091506
    assert "–/3" in ludus("runs").out


def test_only_the_end_of_a_log_is_read(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster, format_evaluation_line(1), *map(format_step_line, range(2, 1200)))
    run = read_listed_runs(ludus)["demo"]
    assert (run["step"], run["result"]) == (1199, None)


def test_a_silent_log_does_not_hide_the_run(
    ludus: RunCli, cluster: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.services.runs.overview._LOG_TIMEOUT_S", 0.1)
    start_run(ludus, cluster, format_step_line(2))
    cluster(lambda c: setattr(c.pods, "num_silent_logs", 1))
    run = read_listed_runs(ludus)["demo"]
    assert (run["status"], run["step"]) == ("running", None)


def test_local_does_not_ask_the_cluster(ludus: RunCli, cluster: Call, local_run: None) -> None:
    start_run(ludus, cluster)
    num_requests = len(cluster(lambda c: list(c.requests)))
    assert set(read_listed_runs(ludus, "--local")) == {"here"}
    assert "where" not in ludus("runs", "--local").out
    assert len(cluster(lambda c: list(c.requests))) == num_requests


def test_the_namespace_chooses_the_runs(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster)
    result = ludus("runs", "--namespace", "elsewhere")
    assert (result.code, result.out) == (0, "")
    assert "no runs in 'runs' or on the cluster" in result.err


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, "the cluster has no RayJobs, in which runs train (see: ludus list)"),
        (403, "the API server refused a request (403) (see: ludus list)"),
        (0, "the API server gave no valid response (see: ludus list)"),
    ],
)
def test_a_failing_cluster_gives_one_notice(
    ludus: RunCli, cluster: Call, local_run: None, status: int, reason: str
) -> None:
    cluster(lambda c: c.fail(status, verb="list", plural="rayjobs", times=9))
    result = ludus("runs")
    assert result.code == 0
    assert "here" in result.out
    assert result.err == (
        f"note: the runs on the cluster are not listed: {reason}; --local leaves them out\n"
    )


@pytest.fixture
def blocked_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a context current whose credentials never arrive."""
    os.mkfifo(tmp_path / "fifo")
    exec_plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "cat",
        "args": [str(tmp_path / "fifo")],
        "interactiveMode": "Never",
    }
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"exec": exec_plugin}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "blocked").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "blocked"))
    yield
    with open(os.open(tmp_path / "fifo", os.O_RDWR), "wb"):
        pass


def test_a_blocked_login_ends_with_a_notice(
    ludus: RunCli, local_run: None, blocked_plugin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_run_list, "TIMEOUT_S", 0.5)
    result = ludus("runs")
    assert result.code == 0
    assert "here" in result.out
    (notice,) = result.err.splitlines()
    assert "the cluster did not respond within 0.5 s" in notice


@pytest.mark.parametrize("option", ["--context", "--namespace"])
def test_a_wrong_choice_of_a_cluster_is_an_error(ludus: RunCli, cluster: Call, option: str) -> None:
    assert ludus("runs", "--local", option, "x").code == 2
    result = ludus("runs", "--context", "missing")
    assert result.code == 2
    assert "missing" in result.err


@pytest.mark.parametrize("text", ["", "current-context: ''\n", '{"current-context": ""}'])
def test_without_a_current_context_no_client_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    program = (
        "import sys\nfrom ludus.services.cli import app\n"
        "sys.argv = ['ludus', 'runs']\n"
        "try:\n    app.main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'kubernetes', 'aiohttp', 'yaml'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert result.stdout == "[]\n"
    assert result.stderr == "no runs in 'runs'; --folder names another folder\n"
