"""Commands that list, inspect, stop, resume and fetch runs on a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ludus.proto.runs import LOG_FILE, LOG_ROW_PREFIX, METRICS_FILE, Phase
from tests.cli.cluster_runs import (
    add_results,
    append_log,
    finish_run,
    get_config_map,
    get_job,
    poll,
    read_error,
    run_in_background,
    start_run,
    submit_run,
)
from tests.cli.commands import RunCli
from tests.gateway.fake_kubernetes import Call, FakeKubernetes
from tests.gateway.fake_kubernetes_pods import CommandResult
from tests.runs.cluster import (
    HEAD,
    format_phase_line,
    format_step_line,
    lose_head,
    make_head_pod,
    set_status,
    start_cluster,
)
from tests.runs.release import NAMESPACE, Json

pytestmark = pytest.mark.slow


def test_list_contains_all_runs(ludus: RunCli, cluster: Call) -> None:
    assert "no runs in namespace 'arena'" in ludus("list").err
    start_run(ludus, cluster)
    ludus("submit", "run.toml", "--detach", "--set", "name=second")
    rows = [line.split() for line in ludus("list").out.splitlines()]
    assert ["demo", "running", "1", "of", "4"] in [row[:5] for row in rows]
    assert ["second", "submitted"] in [row[:2] for row in rows]


def test_status_shows_progress_nodes_and_problems(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster, format_step_line(1), format_step_line(2))
    learner = make_head_pod()
    learner["metadata"].update(name="demo-learner")
    learner["metadata"]["labels"] |= {"ray.io/group": "learner", "ray.io/node-type": "worker"}
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: no GPU"}
    learner["status"] = {"phase": "Pending", "conditions": [condition]}
    cluster(lambda c: c.put(learner))
    output = ludus("status", "demo").out
    assert "demo: running · attempt 1 of 4" in output
    assert "step 2/3" in output
    assert "node-1" in output
    assert "the learner pod demo-learner waits for a node: 0/3 nodes: no GPU" in output


def test_logs_print_the_driver_log_without_metrics_rows(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster, "one", format_step_line(1), "two")
    assert ludus("logs", "demo").out == "one\ntwo\n"


def test_logs_and_states_have_no_hidden_characters(ludus: RunCli, cluster: Call) -> None:
    colored_line = "\x1b[36m(Worker pid=7)\x1b[0m three"
    start_run(ludus, cluster, "\x1b]0;t\x07one\u202e", "\ttwo", colored_line)
    expected_output = "\\x1b]0;t\\x07one\\u202e\n\ttwo\n(Worker pid=7) three\n"
    assert ludus("logs", "demo").out == expected_output


def test_logs_without_a_head_pod_come_from_the_run_folder(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster)
    finish_run(cluster)
    cluster(lose_head)
    cluster(
        lambda c: setattr(
            c.pods, "run", lambda pod, command: CommandResult(output=b"from the folder\n")
        )
    )
    with start_reader_pod(cluster):
        outcome = ludus("logs", "demo")
    assert outcome.out == "from the folder\n", outcome.err
    assert cluster(list_reader_pods) == []  # the reader pod has been deleted


def list_reader_pods(cluster: FakeKubernetes) -> list[Json]:
    """Return the pods that read the volume."""
    return [
        pod for pod in cluster.list_objects("v1", "pods") if "-reader-" in pod["metadata"]["name"]
    ]


@contextmanager
def start_reader_pod(call: Call) -> Iterator[None]:
    """Mark the pod that reads the volume as running, in a background thread."""

    def mark_running() -> None:
        (pod,) = poll(call, list_reader_pods)
        call(lambda c: c.put({**pod, "status": {"phase": "Running"}}))

    with run_in_background(mark_running):
        yield


def test_stop_makes_the_driver_write_a_checkpoint_and_exit(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster, format_step_line(1))

    def simulate_cluster() -> None:
        poll(cluster, lambda c: "control.json" in get_config_map(c)["data"])
        append_log(cluster, format_step_line(2), "stopped after step 2")
        time.sleep(0.2)
        finish_run(cluster)

    with run_in_background(simulate_cluster):
        outcome = ludus("stop", "demo")
    assert outcome.code == 0, outcome.err
    assert "step 0" not in outcome.err
    assert "step 2/3 · stopped" in outcome.err
    assert "stopped at step 2 with a checkpoint; continue with: ludus resume demo" in outcome.err
    assert json.loads(cluster(get_config_map)["data"]["control.json"])["stop"] is True
    pod = cluster(lambda c: c.get("v1", "pods", NAMESPACE, HEAD))
    assert "ludus.dev/nudged" in pod["metadata"]["annotations"]
    assert "stopped" in ludus("list").out
    assert "has already ended" in ludus("stop", "demo").err


def test_scale_requests_workers_which_a_resumed_run_keeps(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster)
    outcome = ludus("scale", "demo", "--workers", "3")
    assert outcome.code == 0, outcome.err
    assert "demo: requested 3 rollout workers" in outcome.out
    assert json.loads(cluster(get_config_map)["data"]["control.json"])["num_workers"] == 3
    cluster(lambda c: set_status(c, jobDeploymentStatus="Failed"))
    assert ludus("resume", "demo", "--detach").code == 0
    assert json.loads(cluster(get_config_map)["data"]["run.json"])["rollout"]["num_workers"] == 3


def test_stop_after_scaling_keeps_the_number_of_workers(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster)
    ludus("scale", "demo", "--workers", "3")
    ludus("stop", "demo", "--timeout", "1")
    control = json.loads(cluster(get_config_map)["data"]["control.json"])
    assert control == {"num_workers": 3, "stop": True}


def test_scale_refuses_more_workers_than_the_run_has_room_for(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster)
    message = read_error(ludus("scale", "demo", "--workers", "50"))
    assert "run 'demo' has room for 4 workers, got 50" in message
    assert "ludus resume demo --set rollout.num_workers=50" in message
    assert "control.json" not in cluster(get_config_map)["data"]


def test_scale_refuses_a_run_that_has_ended(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster)
    finish_run(cluster)
    message = read_error(ludus("scale", "demo", "--workers", "2"))
    assert "run 'demo' has ended; continue it with: ludus resume demo --set" in message


def test_stop_timeout_is_reported(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster)
    outcome = ludus("stop", "demo", "--timeout", "1")
    assert outcome.code != 0
    assert "run 'demo' has not stopped within 1 s" in outcome.err
    assert "ludus stop demo --now" in outcome.err


@pytest.mark.parametrize("job_starts", [True, False])
def test_stop_now_deletes_the_job_but_not_the_configuration(
    ludus: RunCli, cluster: Call, job_starts: bool
) -> None:
    submit_run(ludus, cluster)
    if job_starts:
        cluster(start_cluster)
    outcome = ludus("stop", "demo", *(["--now"] if job_starts else []))
    assert outcome.code == 0, outcome.err
    assert cluster(get_job) is None
    assert not cluster(get_config_map)["metadata"].get("ownerReferences")
    assert "ludus resume demo" in outcome.err
    assert "stopped" in ludus("list").out


def test_logs_of_a_run_that_has_ended_print_its_log_and_its_last_state(
    ludus: RunCli, cluster: Call
) -> None:
    start_run(ludus, cluster, "one", format_step_line(3))
    finish_run(cluster)
    outcome = ludus("logs", "-f", "demo")
    assert outcome.code == 0, outcome.err
    assert outcome.out == "one\n"
    assert "step 3/3" in outcome.err
    assert "run 'demo' has ended: succeeded" in outcome.err
    assert "ludus fetch demo" in outcome.err


@pytest.mark.parametrize(
    ("status", "deployment", "code"),
    [("SUCCEEDED", "Complete", 0), ("STOPPED", "Complete", 130), ("FAILED", "Failed", 1)],
)
def test_logs_of_an_ended_run_without_pods_never_show_step_0(
    ludus: RunCli, cluster: Call, tmp_path: Path, status: str, deployment: str, code: int
) -> None:
    start_run(ludus, cluster)
    finish_run(cluster, status, deployment)
    cluster(lose_head)
    (tmp_path / LOG_FILE).write_text("from the folder\n")
    (tmp_path / METRICS_FILE).write_text(format_step_line(2).removeprefix(LOG_ROW_PREFIX) + "\n")

    def run_command(pod: str, command: list[str]) -> CommandResult:
        assert command[3:] == ["/runs/demo"]
        local_command = [sys.executable, *command[1:3], str(tmp_path)]
        return CommandResult(output=subprocess.run(local_command, stdout=subprocess.PIPE).stdout)

    cluster(lambda c: setattr(c.pods, "run", run_command))
    with start_reader_pod(cluster):
        outcome = ludus("logs", "-f", "demo")
    assert outcome.code == code, outcome.err
    assert outcome.out == "from the folder\n"
    assert "step 2/3" in outcome.err
    assert "step 0" not in outcome.err


@pytest.mark.parametrize("overrides", [[], ["seed=7"], ["training.num_steps=2"]])
def test_resume_of_a_complete_run_says_so_and_starts_nothing(
    ludus: RunCli, cluster: Call, overrides: list[str]
) -> None:
    start_run(ludus, cluster)
    finish_run(cluster)
    old_uid = cluster(get_job)["metadata"]["uid"]
    options = [text for override in overrides for text in ("--set", override)]
    message = read_error(ludus("resume", "demo", *options))
    assert "run 'demo' is complete, so nothing was started; train more steps with" in message
    assert "ludus resume demo --set training.num_steps=6" in message
    assert cluster(get_job)["metadata"]["uid"] == old_uid


@pytest.mark.long
@pytest.mark.parametrize("has_old_log", [True, False])
def test_resume_shows_the_step_of_the_checkpoint(
    ludus: RunCli, cluster: Call, has_old_log: bool
) -> None:
    start_run(ludus, cluster, format_step_line(2))
    finish_run(cluster, "STOPPED")
    if not has_old_log:
        cluster(lose_head)
    old_uid = cluster(get_job)["metadata"]["uid"]

    def simulate_cluster() -> None:
        poll(cluster, lambda c: (job := get_job(c)) and job["metadata"]["uid"] != old_uid)
        cluster(start_cluster)
        append_log(cluster, format_phase_line(Phase.START_WORKERS, step=2))
        num_requests = cluster(lambda c: c.pods.num_log_requests)
        # The second request shows that the response to the first was read.
        poll(cluster, lambda c: c.pods.num_log_requests > num_requests + 2)
        finish_run(cluster, "STOPPED")

    with run_in_background(simulate_cluster):
        outcome = ludus("resume", "demo")
    assert "step 2/3 · starting workers" in outcome.err
    assert outcome.err.splitlines()[1].startswith("step 2/3") or not has_old_log
    assert "step 0" not in outcome.err


def test_resume_replaces_the_old_job(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster)
    assert "has not ended (running); follow it" in read_error(ludus("resume", "demo"))
    finish_run(cluster)
    old_uid = cluster(get_job)["metadata"]["uid"]
    message = read_error(ludus("resume", "demo", "--set", "name=other"))
    assert "a resumed run keeps its name 'demo'" in message
    outcome = ludus("resume", "demo", "--detach", "--set", "training.num_steps=9")
    assert outcome.code == 0, outcome.err
    assert cluster(get_job)["metadata"]["uid"] != old_uid
    config = json.loads(cluster(get_config_map)["data"]["run.json"])
    assert config["training"]["num_steps"] == 9
    assert config["environments"]["blackjack"]["kind"] == "remote"
    owner = cluster(get_config_map)["metadata"]["ownerReferences"][0]
    assert owner["uid"] == cluster(get_job)["metadata"]["uid"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.kind=ppo", "algorithm.kind was 'grpo' and is 'ppo'"),
        ("model.width=256", "model.width was 128 and is 256"),
    ],
)
def test_a_resume_with_another_model_or_algorithm_is_refused(
    ludus: RunCli, cluster: Call, override: str, expected: str
) -> None:
    start_run(ludus, cluster)
    finish_run(cluster)
    previous_objects = cluster(get_job), cluster(get_config_map)
    message = read_error(ludus("resume", "demo", "--detach", "--set", override))
    assert expected in message
    assert "start a run with another name" in message
    assert (cluster(get_job), cluster(get_config_map)) == previous_objects
    longer = "training.num_steps=4"
    assert ludus("resume", "demo", "--detach", "--set", "seed=7", "--set", longer).code == 0


def test_fetch_copies_the_run_folder_and_writes_the_report(
    ludus: RunCli, cluster: Call, tmp_path: Path
) -> None:
    commands = add_results(cluster, tmp_path)
    start_run(ludus, cluster)
    outcome = ludus("fetch", "demo", "--folder", "results")
    assert outcome.code == 0, outcome.err
    assert Path("results/report.html").exists()
    assert commands[0][3:] == ["/runs/demo", "checkpoints", "initial_model", "weights"]
    ludus("fetch", "demo", "--folder", "results", "--all")
    assert commands[1][3:] == ["/runs/demo"]


def test_fetch_does_not_overwrite_other_files(ludus: RunCli, cluster: Call, tmp_path: Path) -> None:
    commands = add_results(cluster, tmp_path)
    start_run(ludus, cluster)
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/config.json").write_text('{"name": "demo", "output_dir": "elsewhere"}')
    message = read_error(ludus("fetch", "demo"))
    assert "'runs/demo' contains another run, from elsewhere; choose another folder" in message
    assert "--folder runs/demo-2" in message
    Path("notes").mkdir()
    Path("notes/metrics.jsonl").write_text("mine")
    message = read_error(ludus("fetch", "demo", "--folder", "notes"))
    assert "'notes' is not empty and not the folder of a run" in message
    assert "is not a folder" in read_error(ludus("fetch", "demo", "--folder", "run.toml/demo"))
    assert commands == []
    assert Path("notes/metrics.jsonl").read_text() == "mine"
    assert [path.name for path in Path("runs").iterdir()] == ["demo"]


def test_fetch_does_not_mix_two_runs_of_the_same_name(
    ludus: RunCli, cluster: Call, tmp_path: Path
) -> None:
    add_results(cluster, tmp_path, run_id="second")
    start_run(ludus, cluster)
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/config.json").write_text('{"name": "demo", "output_dir": "/runs"}')
    Path("runs/demo/run-id").write_text("first")
    assert "another run of the same name" in read_error(ludus("fetch", "demo"))
    Path("runs/demo/run-id").write_text("second")
    assert ludus("fetch", "demo").code == 0


def test_fetch_of_a_run_without_results_is_refused(ludus: RunCli, cluster: Call) -> None:
    failed_command = CommandResult(error_output="there is no folder /runs/demo\n", exit_code=1)
    cluster(lambda c: setattr(c.pods, "run", lambda pod, command: failed_command))
    start_run(ludus, cluster)
    assert "run 'demo' has no folder /runs/demo" in read_error(ludus("fetch", "demo"))


def test_fetch_of_an_unknown_run_starts_no_pod(ludus: RunCli, cluster: Call) -> None:
    submit_run(ludus, cluster)
    num_created = cluster(lambda c: c.num_requests("create", "pods"))
    message = read_error(ludus("fetch", "dmo"))
    assert "there is no run 'dmo' in namespace 'arena'; did you mean 'demo'?" in message
    assert "add --deleted" in message
    assert "cannot be the name of a RayJob" in read_error(ludus("fetch", "--deleted", "../x"))
    assert cluster(lambda c: c.num_requests("create", "pods")) == num_created


def test_a_deleted_run_is_fetched_from_the_volume(
    ludus: RunCli, cluster: Call, tmp_path: Path
) -> None:
    add_results(cluster, tmp_path)
    with start_reader_pod(cluster):
        outcome = ludus("fetch", "--deleted", "demo", "--namespace", NAMESPACE)
    assert outcome.code == 0, outcome.err
    assert Path("runs/demo/report.html").exists()
    assert "ludus resume demo --set training.num_steps=240 --namespace arena" in outcome.out


@pytest.mark.parametrize("command", ["fetch", "status", "logs", "stop", "resume"])
@pytest.mark.parametrize("name", ["", "..", "a/b", "demo?x"])
def test_a_name_that_no_run_has_is_not_looked_up(
    ludus: RunCli, cluster: Call, command: str, name: str
) -> None:
    assert f"there is no run '{name}'" in read_error(ludus(command, name))
    assert cluster(lambda c: c.num_requests("get", "rayjobs")) == 0


def test_fetch_without_a_head_reports_the_problem_of_the_pod(
    ludus: RunCli, cluster: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.services.runs.volume.START_TIMEOUT_S", 1.0)
    submit_run(ludus, cluster)
    cluster(lambda c: c.fail(500, verb="delete", plural="pods", times=1))
    outcome = ludus("fetch", "demo")
    assert outcome.code != 0
    assert "waiting for pod demo-reader-" in outcome.err
    assert "the pod that reads the volume did not start within 1 s" in outcome.err
    assert cluster(list_reader_pods) == []


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["fetch", "logs"])
def test_the_pod_that_reads_the_volume_is_removed_after_a_signal(
    ludus: RunCli, cluster: Call, command: str, signal_number: signal.Signals
) -> None:
    submit_run(ludus, cluster)

    def interrupt() -> None:
        poll(cluster, list_reader_pods)
        os.kill(os.getpid(), signal_number)

    # A job in the background of a shell ignores SIGINT.
    previous_handler = signal.signal(signal_number, signal.default_int_handler)
    try:
        with run_in_background(interrupt):
            outcome = ludus(command, "demo")
    finally:
        signal.signal(signal_number, previous_handler)
    assert outcome.code == 130, outcome.err
    assert cluster(list_reader_pods) == []


def test_a_pod_is_removed_even_if_the_response_to_its_creation_is_lost(
    ludus: RunCli, cluster: Call
) -> None:
    submit_run(ludus, cluster)
    cluster(lambda c: c.fail(0, verb="create", plural="pods"))
    assert ludus("fetch", "demo").code == 1
    assert cluster(list_reader_pods) == []
