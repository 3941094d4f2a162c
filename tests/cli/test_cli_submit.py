"""`ludus submit` and `ludus logs -f`, and the mistakes that people make with them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from ludus.services.runs import follow
from tests.cli.cluster_runs import (
    CONFIG,
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
from tests.gateway.fake_kubernetes import Call
from tests.runs.cluster import (
    begin,
    head_pod,
    phase_row,
    set_status,
    step_row,
)
from tests.runs.release import NAMESPACE, config_map

pytestmark = pytest.mark.slow


def test_a_dry_run_prints_what_would_be_created_and_creates_nothing(
    ludus: RunCli, cluster: Call
) -> None:
    shown = ludus("submit", "run.toml", "--dry-run", "-o", "yaml", "--set", "training.num_steps=7")
    assert shown.code == 0, shown.err
    config_map, job = yaml.load_all(shown.out, yaml.CSafeLoader)
    assert [config_map["kind"], job["kind"]] == ["ConfigMap", "RayJob"]
    assert json.loads(config_map["data"]["run.json"])["training"]["num_steps"] == 7
    as_json = json.loads(ludus("submit", "run.toml", "--dry-run", "-o", "json").out)
    assert as_json["items"][1] == job
    assert cluster(job_of) is None
    assert cluster(map_of) is None


def test_a_dry_run_needs_no_cluster_where_helm_wrote_the_release(
    ludus: RunCli, cluster: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "rendered.yaml").write_text(yaml.safe_dump(config_map()))
    shown = ludus("submit", "run.toml", "--dry-run", "--release-file", "rendered.yaml")
    assert [one["kind"] for one in yaml.load_all(shown.out, yaml.CSafeLoader)] == [
        "ConfigMap",
        "RayJob",
    ]
    said = one_error(ludus("submit", "run.toml", "--release-file", "rendered.yaml"))
    assert "--release-file needs --dry-run" in said


def test_a_run_is_followed_to_its_end_and_its_results_come(
    ludus: RunCli, cluster: Call, tmp_path: Path
) -> None:
    has_results(cluster, tmp_path)

    def operate() -> None:
        wait_for(cluster, job_of)
        cluster(begin)
        say(cluster, phase_row(), "warning: something odd", step_row(1), step_row(2))
        wait_for(cluster, lambda c: c.pods.num_log_requests)
        say(cluster, step_row(3))
        time.sleep(0.3)
        ended(cluster)

    with meanwhile(operate):
        outcome = ludus("submit", "run.toml")
    assert outcome.code == 0, outcome.err
    assert "run 'demo' submitted to namespace 'arena'" in outcome.err
    assert "step 3/3 · training" in outcome.err
    assert outcome.err.count("warning: something odd") == 1
    assert "report      runs/demo/report.html" in outcome.out + outcome.err
    assert "ludus resume demo --set training.num_steps=" in outcome.out + outcome.err
    owner = cluster(map_of)["metadata"]["ownerReferences"][0]
    assert owner["uid"] == cluster(job_of)["metadata"]["uid"]


def test_a_run_that_fails_says_what_its_driver_said_and_how_often_it_was_tried(
    ludus: RunCli, cluster: Call
) -> None:
    running(ludus, cluster, "error: model.name: no such model", "  see the hub")
    message = "driver failed with exit code 2"
    ended(cluster, "FAILED", "Failed", reason="AppFailed", message=message, failed=3)
    outcome = ludus("logs", "-f", "demo")
    assert outcome.code == 2
    assert "error: model.name: no such model\n  see the hub" in outcome.err
    assert "failed after 3 attempts: the trainer ended with an error" in outcome.err


def test_a_run_that_the_operator_refuses_says_why(ludus: RunCli, cluster: Call) -> None:
    submitted(ludus, cluster)
    call_message = "spec.backoffLimit must be 0"
    ended(cluster, "", "ValidationFailed", message=call_message)
    said = one_error(ludus("logs", "-f", "demo"))
    assert said == "error: KubeRay refused the RayJob: spec.backoffLimit must be 0"


def test_what_keeps_pods_from_running_is_said_while_they_are_awaited(
    ludus: RunCli, cluster: Call
) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found: trainer:dev"}}
    broken = {"containerStatuses": [{"image": "trainer:dev", "state": waiting}]}

    def operate() -> None:
        wait_for(cluster, job_of)
        cluster(
            lambda c: set_status(c, jobDeploymentStatus="Initializing", rayClusterName="demo-abcde")
        )
        cluster(lambda c: c.put(head_pod(phase="Pending", **broken)))
        num_looks = cluster(lambda c: c.num_requests("list", "pods"))
        wait_for(cluster, lambda c: c.num_requests("list", "pods") > num_looks + 1)
        ended(cluster, "FAILED", "Failed", reason="PreRunningDeadlineExceeded")

    with meanwhile(operate):
        outcome = ludus("submit", "run.toml")
    assert outcome.code == 1
    assert "waiting for pods" in outcome.err
    assert outcome.err.count("the head pod demo-head does not start: ImagePullBackOff") == 1
    assert "push the image, or set image.registry" in outcome.err
    assert "the run did not start within preRunningDeadlineSeconds" in outcome.err


def test_a_log_that_breaks_off_and_a_server_that_is_away_lose_no_line(
    ludus: RunCli, cluster: Call
) -> None:
    running(ludus, cluster, *map(step_row, (1, 2)))
    cluster(lambda c: setattr(c.pods, "cut_logs", 2))

    def operate() -> None:
        wait_for(cluster, lambda c: c.pods.num_log_requests)
        cluster(lambda c: c.fail(503, verb="get", plural="rayjobs", times=2))
        wait_for(cluster, lambda c: c.pods.num_log_requests > 2)
        say(cluster, step_row(3), "warning: the last one")
        time.sleep(0.3)
        ended(cluster, "STOPPED")

    with meanwhile(operate):
        outcome = ludus("logs", "-f", "demo")
    assert outcome.code == 130
    assert "step 3/3" in outcome.err
    assert outcome.err.count("the last one") == 1


def test_a_log_that_says_nothing_any_more_is_asked_for_anew(
    ludus: RunCli, cluster: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "SILENT_LOG_S", 0.3)
    running(ludus, cluster, *map(step_row, (1, 2)))
    cluster(lambda c: setattr(c.pods, "silent_logs", 2))

    def operate() -> None:
        wait_for(cluster, lambda c: c.pods.num_log_requests > 2)
        ended(cluster, "STOPPED")

    with meanwhile(operate):
        outcome = ludus("logs", "-f", "demo")
    assert "step 2/3" in outcome.err
    assert "warning" not in outcome.err


@pytest.mark.slow
def test_a_log_that_its_node_cannot_open_is_told_and_read_later(
    ludus: RunCli, cluster: Call
) -> None:
    running(ludus, cluster, *map(step_row, (1, 2, 3)))
    cluster(lambda c: setattr(c.pods, "unreadable_log", 'lstat "0.log": no such file'))

    def operate() -> None:
        wait_for(cluster, lambda c: c.pods.num_log_requests > 1)
        num_looks = cluster(lambda c: c.num_requests("get", "rayjobs"))
        wait_for(cluster, lambda c: c.num_requests("get", "rayjobs") > num_looks + 1)
        cluster(lambda c: setattr(c.pods, "unreadable_log", ""))
        ended(cluster, "STOPPED")

    with meanwhile(operate):
        outcome = ludus("logs", "-f", "demo")
    assert (
        outcome.err.count('steps are not shown, because the log cannot be read: lstat "0.log"') == 1
    )
    assert "step 3/3" in outcome.err


def test_a_run_that_somebody_deletes_ends_the_following(ludus: RunCli, cluster: Call) -> None:
    def operate() -> None:
        wait_for(cluster, job_of)
        cluster(begin)
        say(cluster, step_row(1))
        wait_for(cluster, lambda c: c.pods.num_log_requests)
        cluster(lambda c: c.remove("ray.io/v1", "rayjobs", NAMESPACE, "demo"))

    with meanwhile(operate):
        outcome = ludus("submit", "run.toml")
    assert "there is no run 'demo' in namespace 'arena'" in one_error(outcome)
    assert "the run goes on" not in outcome.err


# Mistakes.


def test_a_problem_of_the_preflight_ends_the_command_before_anything_is_made(
    ludus: RunCli, cluster: Call
) -> None:
    cluster(lambda c: c.remove("v1", "secrets", NAMESPACE, "ludus-auth"))
    assert "there is no Secret 'ludus-auth'" in one_error(ludus("submit", "run.toml"))
    assert cluster(map_of) is None
    assert ludus("submit", "run.toml", "--detach", "--ignore", "secrets").code == 0


def test_without_a_cluster_the_way_out_is_to_train_here(
    ludus: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    said = one_error(ludus("submit", "run.toml"))
    assert "no cluster is configured" in said
    assert "to train on this machine, use `ludus train`" in said


def test_a_cluster_that_does_not_answer_is_told_in_a_sentence(
    ludus: RunCli, cluster: Call, tmp_path: Path
) -> None:
    path = tmp_path / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    path.write_text(yaml.safe_dump(config))
    outcome = ludus("list")
    assert outcome.code != 0
    (said,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert "no response from the API server" in said
    assert "check that the cluster runs" in said


@pytest.mark.parametrize(
    ("status", "way_out"),
    [(401, "log in to the cluster again"), (403, "ask for the Role that docs/submit.md names")],
)
def test_an_api_server_that_refuses_is_told_with_the_way_out(
    ludus: RunCli, cluster: Call, status: int, way_out: str
) -> None:
    cluster(lambda c: c.fail(status, plural="configmaps", times=9))
    outcome = ludus("submit", "run.toml")
    assert outcome.code != 0
    (said,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert f"{status} " in said
    assert way_out in said


def test_an_unknown_context_names_where_to_look(ludus: RunCli, cluster: Call) -> None:
    said = one_error(ludus("list", "--context", "y"))
    assert "kubectl config get-contexts" in said


def test_without_a_release_the_way_out_is_to_install_one(ludus: RunCli, cluster: Call) -> None:
    said = one_error(ludus("submit", "run.toml", "-n", "elsewhere"))
    assert "there is no Ludus release in namespace 'elsewhere'; install one with" in said
    assert "--namespace" in said
    said = one_error(ludus("submit", "run.toml", "--release", "luds"))
    assert "there is no release 'luds'" in said
    assert "did you mean 'ludus'" in said


def test_a_name_that_is_taken_says_how_to_go_on(ludus: RunCli, cluster: Call) -> None:
    running(ludus, cluster)
    said = one_error(ludus("submit", "run.toml"))
    assert "already exists in namespace 'arena' (running); see: ludus status demo" in said
    ended(cluster)
    assert "resume it with: ludus resume demo" in one_error(ludus("submit", "run.toml"))


@pytest.mark.parametrize("command", ["status", "logs", "stop", "resume"])
def test_a_run_that_is_not_there_says_where_to_look(
    ludus: RunCli, cluster: Call, command: str
) -> None:
    submitted(ludus, cluster)
    said = one_error(ludus(command, "dmo"))
    assert "there is no run 'dmo' in namespace 'arena'" in said
    assert "demo" in said or "ludus list" in said


@pytest.mark.parametrize("option", ["blackjack", "=x", "blackjack="])
def test_an_environment_option_of_another_form_is_refused(
    ludus: RunCli, cluster: Call, option: str
) -> None:
    said = one_error(ludus("submit", "run.toml", "--environment", option))
    assert f"--environment must be NAME=SERVED, got '{option}'" in said
