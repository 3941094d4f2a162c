"""`ludus submit` and `ludus logs -f`, including common user errors."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from ludus.services.runs import follow
from tests.cli.cluster_runs import (
    CONFIG,
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
from tests.runs.cluster import (
    format_phase_line,
    format_step_line,
    make_head_pod,
    set_status,
    start_cluster,
)
from tests.runs.release import NAMESPACE, Json, make_config_map, make_policy_template

pytestmark = pytest.mark.slow


def test_dry_run_prints_the_kubernetes_objects_and_creates_none(
    ludus: RunCli, cluster: Call
) -> None:
    result = ludus("submit", "run.toml", "--dry-run", "-o", "yaml", "--set", "training.num_steps=7")
    assert result.code == 0, result.err
    config_map, job = yaml.load_all(result.out, yaml.CSafeLoader)
    assert [config_map["kind"], job["kind"]] == ["ConfigMap", "RayJob"]
    assert json.loads(config_map["data"]["run.json"])["training"]["num_steps"] == 7
    json_output = json.loads(ludus("submit", "run.toml", "--dry-run", "-o", "json").out)
    assert json_output["items"][1] == job
    assert cluster(get_job) is None
    assert cluster(get_config_map) is None


def test_a_run_has_its_own_network_policy(ludus: RunCli, cluster: Call) -> None:
    release = make_config_map()
    release["data"]["networkpolicy.yaml"] = yaml.safe_dump(make_policy_template())
    cluster(lambda c: c.put(release))
    dry_run = ludus("submit", "run.toml", "--dry-run")
    kinds = [document["kind"] for document in yaml.load_all(dry_run.out, yaml.CSafeLoader)]
    assert kinds == ["ConfigMap", "NetworkPolicy", "RayJob"]

    def get_policy(c: FakeKubernetes) -> Json | None:
        return c.get("networking.k8s.io/v1", "networkpolicies", NAMESPACE, "demo-network")

    cluster(lambda c: c.fail(403, verb="create", plural="rayjobs", times=2))
    assert ludus("submit", "run.toml", "--detach", "--ignore", "admission").code == 1
    assert cluster(get_policy) is None
    cluster(lambda c: c.clear_failures())
    submit_run(ludus, cluster)
    policy, job = cluster(get_policy), cluster(get_job)
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector["ludus.dev/run"] == "demo"
    assert policy["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    labels = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert labels["ludus.dev/run"] == "demo"
    assert labels["ludus.dev/network"] == "run"
    finish_run(cluster, "STOPPED")
    cluster(lambda c: c.fail(403, verb="create", plural="networkpolicies", times=2))
    assert "refuses the NetworkPolicy: 403" in read_error(ludus("resume", "demo", "--detach"))
    assert cluster(get_job)["metadata"]["uid"] == job["metadata"]["uid"]
    assert ludus("resume", "demo", "--detach", "--ignore", "admission").code == 1
    assert "demo" in ludus("list").out  # the configuration is kept, so that the run can be resumed
    assert ludus("resume", "demo", "--detach").code == 0
    owner = cluster(get_policy)["metadata"]["ownerReferences"][0]
    assert owner["uid"] == cluster(get_job)["metadata"]["uid"]


def test_a_dry_run_with_a_release_file_needs_no_cluster(
    ludus: RunCli, cluster: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "rendered.yaml").write_text(yaml.safe_dump(make_config_map()))
    result = ludus("submit", "run.toml", "--dry-run", "--release-file", "rendered.yaml")
    assert [document["kind"] for document in yaml.load_all(result.out, yaml.CSafeLoader)] == [
        "ConfigMap",
        "RayJob",
    ]
    message = read_error(ludus("submit", "run.toml", "--release-file", "rendered.yaml"))
    assert "--release-file needs --dry-run" in message


def test_run_is_followed_to_the_end_and_fetched(
    ludus: RunCli, cluster: Call, tmp_path: Path
) -> None:
    add_results(cluster, tmp_path)

    def simulate_cluster() -> None:
        poll(cluster, get_job)
        cluster(start_cluster)
        append_log(
            cluster,
            format_phase_line(),
            "warning: slow step",
            format_step_line(1),
            format_step_line(2),
        )
        poll(cluster, lambda c: c.pods.num_log_requests)
        append_log(cluster, format_step_line(3))
        time.sleep(0.3)
        finish_run(cluster)

    with run_in_background(simulate_cluster):
        outcome = ludus("submit", "run.toml")
    assert outcome.code == 0, outcome.err
    assert "run 'demo' submitted to namespace 'arena'" in outcome.err
    assert "step 3/3 · training" in outcome.err
    assert outcome.err.count("warning: slow step") == 1
    assert "report      runs/demo/report.html" in outcome.out + outcome.err
    assert "ludus resume demo --set training.num_steps=" in outcome.out + outcome.err
    owner = cluster(get_config_map)["metadata"]["ownerReferences"][0]
    assert owner["uid"] == cluster(get_job)["metadata"]["uid"]


def test_a_failed_run_shows_the_error_and_the_attempts(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster, "error: model.name: no such model", "  see the hub")
    message = "driver failed with exit code 2"
    finish_run(cluster, "FAILED", "Failed", reason="AppFailed", message=message, failed=3)
    outcome = ludus("logs", "-f", "demo")
    assert outcome.code == 2
    assert "error: model.name: no such model\n  see the hub" in outcome.err
    assert "failed after 3 attempts: the trainer ended with an error" in outcome.err


def test_refusal_by_the_operator_is_reported_with_the_reason(ludus: RunCli, cluster: Call) -> None:
    submit_run(ludus, cluster)
    refusal = "spec.backoffLimit must be 0"
    finish_run(cluster, "", "ValidationFailed", message=refusal)
    message = read_error(ludus("logs", "-f", "demo"))
    assert message == "error: KubeRay refused the RayJob: spec.backoffLimit must be 0"


def test_pod_problems_are_reported_during_the_wait(ludus: RunCli, cluster: Call) -> None:
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "not found: trainer:dev"}}
    pod_status = {"containerStatuses": [{"image": "trainer:dev", "state": state}]}

    def simulate_cluster() -> None:
        poll(cluster, get_job)
        cluster(
            lambda c: set_status(c, jobDeploymentStatus="Initializing", rayClusterName="demo-abcde")
        )
        cluster(lambda c: c.put(make_head_pod(phase="Pending", **pod_status)))
        num_requests = cluster(lambda c: c.num_requests("list", "pods"))
        poll(cluster, lambda c: c.num_requests("list", "pods") > num_requests + 1)
        finish_run(cluster, "FAILED", "Failed", reason="PreRunningDeadlineExceeded")

    with run_in_background(simulate_cluster):
        outcome = ludus("submit", "run.toml")
    assert outcome.code == 1
    assert "waiting for pods" in outcome.err
    assert outcome.err.count("the head pod demo-head does not start: ImagePullBackOff") == 1
    assert "push the image, or set image.registry" in outcome.err
    assert "the run did not start within preRunningDeadlineSeconds" in outcome.err


def test_log_interruptions_and_api_errors_lose_no_line(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster, *map(format_step_line, (1, 2)))
    cluster(lambda c: setattr(c.pods, "num_cut_logs", 2))

    def simulate_cluster() -> None:
        poll(cluster, lambda c: c.pods.num_log_requests)
        cluster(lambda c: c.fail(503, verb="get", plural="rayjobs", times=2))
        poll(cluster, lambda c: c.pods.num_log_requests > 2)
        append_log(cluster, format_step_line(3), "warning: last line")
        time.sleep(0.3)
        finish_run(cluster, "STOPPED")

    with run_in_background(simulate_cluster):
        outcome = ludus("logs", "-f", "demo")
    assert outcome.code == 130
    assert "step 3/3" in outcome.err
    assert outcome.err.count("last line") == 1


def test_a_silent_log_is_requested_again(
    ludus: RunCli, cluster: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "SILENT_LOG_S", 0.3)
    start_run(ludus, cluster, *map(format_step_line, (1, 2)))
    cluster(lambda c: setattr(c.pods, "num_silent_logs", 2))

    def simulate_cluster() -> None:
        poll(cluster, lambda c: c.pods.num_log_requests > 2)
        finish_run(cluster, "STOPPED")

    with run_in_background(simulate_cluster):
        outcome = ludus("logs", "-f", "demo")
    assert "step 2/3" in outcome.err
    assert "warning" not in outcome.err


@pytest.mark.slow
def test_unreadable_log_is_reported_and_read_later(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster, *map(format_step_line, (1, 2, 3)))
    cluster(lambda c: setattr(c.pods, "log_error_text", 'lstat "0.log": no such file'))

    def simulate_cluster() -> None:
        poll(cluster, lambda c: c.pods.num_log_requests > 1)
        num_requests = cluster(lambda c: c.num_requests("get", "rayjobs"))
        poll(cluster, lambda c: c.num_requests("get", "rayjobs") > num_requests + 1)
        cluster(lambda c: setattr(c.pods, "log_error_text", ""))
        finish_run(cluster, "STOPPED")

    with run_in_background(simulate_cluster):
        outcome = ludus("logs", "-f", "demo")
    assert (
        outcome.err.count('steps are not shown, because the log cannot be read: lstat "0.log"') == 1
    )
    assert "step 3/3" in outcome.err


def test_deleted_run_makes_submit_exit_with_an_error(ludus: RunCli, cluster: Call) -> None:
    def simulate_cluster() -> None:
        poll(cluster, get_job)
        cluster(start_cluster)
        append_log(cluster, format_step_line(1))
        poll(cluster, lambda c: c.pods.num_log_requests)
        cluster(lambda c: c.remove("ray.io/v1", "rayjobs", NAMESPACE, "demo"))

    with run_in_background(simulate_cluster):
        outcome = ludus("submit", "run.toml")
    assert "there is no run 'demo' in namespace 'arena'" in read_error(outcome)
    assert "the run continues" not in outcome.err


# User errors.


def test_failed_check_prevents_the_creation_of_objects(ludus: RunCli, cluster: Call) -> None:
    cluster(lambda c: c.remove("v1", "secrets", NAMESPACE, "ludus-auth"))
    assert "there is no Secret 'ludus-auth'" in read_error(ludus("submit", "run.toml"))
    assert cluster(get_config_map) is None
    assert ludus("submit", "run.toml", "--detach", "--ignore", "secrets").code == 0


def test_submit_without_a_cluster_suggests_local_training(
    ludus: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    message = read_error(ludus("submit", "run.toml"))
    assert "no cluster is configured" in message
    assert "to train on this machine, use `ludus train`" in message


def test_unreachable_api_server_is_reported(ludus: RunCli, cluster: Call, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    path.write_text(yaml.safe_dump(config))
    outcome = ludus("list")
    assert outcome.code != 0
    (message,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert "no response from the API server" in message
    assert "check that the cluster runs" in message


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(401, "log in to the cluster again"), (403, "ask for the Role that docs/submit.md names")],
)
def test_error_of_the_api_server_is_reported_with_a_remedy(
    ludus: RunCli, cluster: Call, status: int, remedy: str
) -> None:
    cluster(lambda c: c.fail(status, plural="configmaps", times=9))
    outcome = ludus("submit", "run.toml")
    assert outcome.code != 0
    (message,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert f"{status} " in message
    assert remedy in message


def test_unknown_context_is_refused_with_a_remedy(ludus: RunCli, cluster: Call) -> None:
    message = read_error(ludus("list", "--context", "y"))
    assert "kubectl config get-contexts" in message


def test_submit_without_a_release_suggests_an_installation(ludus: RunCli, cluster: Call) -> None:
    message = read_error(ludus("submit", "run.toml", "-n", "elsewhere"))
    assert "there is no Ludus release in namespace 'elsewhere'; install one with" in message
    assert "--namespace" in message
    message = read_error(ludus("submit", "run.toml", "--release", "luds"))
    assert "there is no release 'luds'" in message
    assert "did you mean 'ludus'" in message


def test_an_existing_name_is_refused_with_a_remedy(ludus: RunCli, cluster: Call) -> None:
    start_run(ludus, cluster)
    message = read_error(ludus("submit", "run.toml"))
    assert "already exists in namespace 'arena' (running); see: ludus status demo" in message
    finish_run(cluster)
    assert "resume it with: ludus resume demo" in read_error(ludus("submit", "run.toml"))


@pytest.mark.parametrize(
    ("used_path", "expected"),
    [
        ("runs/demo/config.json", "'runs/demo' is not empty"),
        ("runs/demo/notes.txt", "'runs/demo' is not empty"),
        ("runs/demo", "runs/demo' is not a folder"),
        ("runs", "runs' is not a folder"),
    ],
)
def test_a_used_results_folder_is_refused_before_the_start(
    ludus: RunCli, cluster: Call, used_path: str, expected: str
) -> None:
    Path(used_path).parent.mkdir(parents=True, exist_ok=True)
    Path(used_path).write_text("{}")
    message = read_error(ludus("submit", "run.toml"))
    assert expected in message
    assert "--folder" in message
    assert cluster(get_config_map) is None
    assert cluster(get_job) is None
    submit_run(ludus, cluster)
    finish_run(cluster, "STOPPED")
    assert "--folder" in read_error(ludus("resume", "demo"))
    assert cluster(get_config_map)["metadata"]["ownerReferences"]


def test_submit_fails_if_the_results_cannot_be_copied(
    ludus: RunCli, cluster: Call, tmp_path: Path
) -> None:
    add_results(cluster, tmp_path)

    def simulate_cluster() -> None:
        poll(cluster, get_job)
        cluster(start_cluster)
        Path("runs/demo").mkdir(parents=True)
        Path("runs/demo/notes.txt").write_text("mine")
        finish_run(cluster)

    with run_in_background(simulate_cluster):
        outcome = ludus("submit", "run.toml", "--namespace", NAMESPACE)
    assert outcome.code == 1
    assert "error: the results are still on the cluster: 'runs/demo' is not empty" in outcome.err
    assert "copy them with: ludus fetch demo --folder runs/demo-2 --namespace arena" in outcome.err
    assert ludus("fetch", "demo", "--folder", "runs/demo-2").code == 0


@pytest.mark.parametrize("command", ["status", "logs", "stop", "resume", "fetch"])
def test_a_missing_run_is_refused_with_a_remedy(ludus: RunCli, cluster: Call, command: str) -> None:
    submit_run(ludus, cluster)
    message = read_error(ludus(command, "dmo"))
    assert "there is no run 'dmo' in namespace 'arena'" in message
    assert "demo" in message or "ludus list" in message


@pytest.mark.parametrize("option", ["blackjack", "=x", "blackjack="])
def test_an_invalid_environment_option_is_refused(
    ludus: RunCli, cluster: Call, option: str
) -> None:
    message = read_error(ludus("submit", "run.toml", "--environment", option))
    assert f"--environment must be NAME=SERVED, got '{option}'" in message
