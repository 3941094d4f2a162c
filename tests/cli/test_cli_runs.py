"""Runs on a cluster that are there already, by the commands that people type."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.cluster_runs import (
    ended,
    has_results,
    job_of,
    map_of,
    meanwhile,
    one_error,
    running,
    say,
    submitted,
    wait_for,
)
from tests.cli.commands import RunCli
from tests.gateway.fake_kubernetes import Call, FakeKubernetes
from tests.gateway.fake_kubernetes_pods import Ran
from tests.runs.cluster import (
    HEAD,
    begin,
    head_pod,
    lose_head,
    step_row,
)
from tests.runs.release import NAMESPACE, Json

pytestmark = pytest.mark.slow


def test_a_list_has_all_runs(ludus: RunCli, cluster: Call) -> None:
    assert "no runs in namespace 'arena'" in ludus("list").err
    running(ludus, cluster)
    ludus("submit", "run.toml", "--detach", "--set", "name=second")
    rows = [line.split() for line in ludus("list").out.splitlines()]
    assert ["demo", "running", "1", "of", "4"] in [row[:5] for row in rows]
    assert ["second", "submitted"] in [row[:2] for row in rows]


def test_a_status_says_how_far_it_is_on_which_nodes_and_what_keeps_it(
    ludus: RunCli, cluster: Call
) -> None:
    running(ludus, cluster, step_row(1), step_row(2))
    learner = head_pod()
    learner["metadata"].update(name="demo-learner")
    learner["metadata"]["labels"] |= {"ray.io/group": "learner", "ray.io/node-type": "worker"}
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: no GPU"}
    learner["status"] = {"phase": "Pending", "conditions": [condition]}
    cluster(lambda c: c.put(learner))
    shown = ludus("status", "demo").out
    assert "demo: running · attempt 1 of 4" in shown
    assert "step 2/3" in shown
    assert "node-1" in shown
    assert "the learner pod demo-learner waits for a node: 0/3 nodes: no GPU" in shown


def test_logs_are_the_drivers_lines_without_the_rows(ludus: RunCli, cluster: Call) -> None:
    running(ludus, cluster, "one", step_row(1), "two")
    assert ludus("logs", "demo").out == "one\ntwo\n"


def test_logs_of_a_run_whose_head_is_gone_are_those_in_its_folder(
    ludus: RunCli, cluster: Call
) -> None:
    running(ludus, cluster)
    ended(cluster)
    cluster(lose_head)
    cluster(lambda c: setattr(c.pods, "run", lambda pod, command: Ran(out=b"from the folder\n")))
    with started_readers(cluster):
        outcome = ludus("logs", "demo")
    assert outcome.out == "from the folder\n", outcome.err
    assert cluster(readers) == []  # the pod that read it is gone again


def readers(cluster: FakeKubernetes) -> list[Json]:
    """The pods that read the volume."""
    return [pod for pod in cluster.all("v1", "pods") if "-reader-" in pod["metadata"]["name"]]


@contextmanager
def started_readers(call: Call) -> Iterator[None]:
    """A node starts the pod that reads the volume."""

    def start() -> None:
        (pod,) = wait_for(call, readers)
        call(lambda c: c.put({**pod, "status": {"phase": "Running"}}))

    with meanwhile(start):
        yield


def test_stop_has_the_driver_end_with_a_checkpoint(ludus: RunCli, cluster: Call) -> None:
    running(ludus, cluster, step_row(1))

    def operate() -> None:
        wait_for(cluster, lambda c: "control.json" in map_of(c)["data"])
        say(cluster, step_row(2), "stopped after step 2")
        time.sleep(0.2)
        ended(cluster)

    with meanwhile(operate):
        outcome = ludus("stop", "demo")
    assert outcome.code == 0, outcome.err
    assert "stopped with a checkpoint; continue with: ludus resume demo" in outcome.err
    assert json.loads(cluster(map_of)["data"]["control.json"])["stop"] is True
    pod = cluster(lambda c: c.get("v1", "pods", NAMESPACE, HEAD))
    assert "ludus.dev/nudged" in pod["metadata"]["annotations"]
    assert "stopped" in ludus("list").out
    assert "has already ended" in ludus("stop", "demo").err


def test_stop_says_when_it_takes_too_long(ludus: RunCli, cluster: Call) -> None:
    running(ludus, cluster)
    outcome = ludus("stop", "demo", "--timeout", "1")
    assert outcome.code != 0
    assert "run 'demo' has not stopped within 1 s" in outcome.err
    assert "ludus stop demo --now" in outcome.err


@pytest.mark.parametrize("begins", [True, False])
def test_stop_now_and_stop_before_it_begins_delete_it_but_keep_what_it_is(
    ludus: RunCli, cluster: Call, begins: bool
) -> None:
    submitted(ludus, cluster)
    if begins:
        cluster(begin)
    outcome = ludus("stop", "demo", *(["--now"] if begins else []))
    assert outcome.code == 0, outcome.err
    assert cluster(job_of) is None
    assert not cluster(map_of)["metadata"].get("ownerReferences")
    assert "ludus resume demo" in outcome.err
    assert "stopped" in ludus("list").out


def test_resume_puts_a_new_job_in_the_old_ones_place(ludus: RunCli, cluster: Call) -> None:
    running(ludus, cluster)
    assert "has not ended (running); follow it" in one_error(ludus("resume", "demo"))
    ended(cluster)
    old = cluster(job_of)["metadata"]["uid"]
    said = one_error(ludus("resume", "demo", "--set", "name=other"))
    assert "a resumed run keeps its name 'demo'" in said
    outcome = ludus("resume", "demo", "--detach", "--set", "training.num_steps=9")
    assert outcome.code == 0, outcome.err
    assert cluster(job_of)["metadata"]["uid"] != old
    found = json.loads(cluster(map_of)["data"]["run.json"])
    assert found["training"]["num_steps"] == 9
    assert found["environments"]["blackjack"]["kind"] == "remote"
    owner = cluster(map_of)["metadata"]["ownerReferences"][0]
    assert owner["uid"] == cluster(job_of)["metadata"]["uid"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("algorithm.kind=ppo", "algorithm.kind was 'grpo' and is 'ppo'"),
        ("model.width=256", "model.width was 128 and is 256"),
    ],
)
def test_a_resume_with_another_model_or_algorithm_is_refused_and_leaves_the_run_as_it_was(
    ludus: RunCli, cluster: Call, override: str, told: str
) -> None:
    running(ludus, cluster)
    ended(cluster)
    before = cluster(job_of), cluster(map_of)
    said = one_error(ludus("resume", "demo", "--detach", "--set", override))
    assert told in said
    assert "start a run with another name" in said
    assert (cluster(job_of), cluster(map_of)) == before
    assert ludus("resume", "demo", "--detach", "--set", "seed=7").code == 0


def test_fetch_brings_the_folder_and_writes_the_report(
    ludus: RunCli, cluster: Call, tmp_path: Path
) -> None:
    asked = has_results(cluster, tmp_path)
    running(ludus, cluster)
    outcome = ludus("fetch", "demo", "--folder", "there")
    assert outcome.code == 0, outcome.err
    assert Path("there/report.html").exists()
    assert asked[0][3:] == ["/runs/demo", "checkpoints", "initial_model", "weights"]
    ludus("fetch", "demo", "--folder", "there", "--all")
    assert asked[1][3:] == ["/runs/demo"]


def test_fetch_replaces_no_other_runs_results(ludus: RunCli, cluster: Call, tmp_path: Path) -> None:
    has_results(cluster, tmp_path)
    running(ludus, cluster)
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/config.json").write_text('{"name": "demo", "output_dir": "elsewhere"}')
    said = one_error(ludus("fetch", "demo"))
    assert "'runs/demo' contains another run, from elsewhere; choose another folder" in said
    assert [path.name for path in Path("runs").iterdir()] == ["demo"]


def test_fetch_of_a_run_that_left_nothing_says_so(ludus: RunCli, cluster: Call) -> None:
    failed = Ran(err="there is no folder /runs/demo\n", code=1)
    cluster(lambda c: setattr(c.pods, "run", lambda pod, command: failed))
    running(ludus, cluster)
    assert "run 'demo' has no folder /runs/demo" in one_error(ludus("fetch", "demo"))


def test_fetch_without_a_head_says_why_its_pod_does_not_start(
    ludus: RunCli, cluster: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.services.runs.reader.START_TIMEOUT_S", 1.0)
    submitted(ludus, cluster)
    outcome = ludus("fetch", "demo")
    assert outcome.code != 0
    assert "the pod that reads the volume did not start within 1 s" in outcome.err
    assert cluster(readers) == []
