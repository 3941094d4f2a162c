"""Alerts of a real Prometheus for problems that the tests cause on the cluster.

The rules use shorter durations (faster_rules.py). LudusCanaryFailed and LudusWeightsDiffer are not
tested, because no outside action makes a worker report weights that it does not use.
LudusEpisodesFailed is not tested, because the run here trains in an environment without faults.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.cluster import fault_player, faulty_environment
from tests.cluster.client_pod import run_client_pod
from tests.cluster.faster_rules import SCRAPE_INTERVAL, apply_faster_rules
from tests.cluster.installed import (
    CHART,
    ROOT,
    Release,
    create_object,
    find_skip_reason,
    install,
    kubectl,
    wait_until,
)
from tests.cluster.prometheus import fetch_series, has_prometheus, list_firing_alerts
from tests.cluster.training import end_runs, submit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
ALERT_TIMEOUT_S = 180.0
CAPACITY = 4
FAULTY_ENVIRONMENT, BLACKJACK_ENVIRONMENT = "faulty", "blackjack"
PLAYER_PROGRAM = Path(fault_player.__file__)
SERVER_DEPLOYMENT = "deployment/ludus-env-{}"
STORE_DEPLOYMENT = "deployment/ludus-store"
STORE_OUTAGE_S = 25.0
DASHBOARDS_PAGE = ROOT / "docs" / "dashboards.md"
TARGET_MEMORY_SHARE = 0.93
"""Target share of used memory. Ray kills workers at 0.95."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    if not has_prometheus():
        pytest.skip("SKIPPED, NOT PASSED: no Prometheus operator is installed")
    values_path = tmp_path_factory.mktemp("values") / "faulty.yaml"
    values_path.write_text(yaml.safe_dump(make_faulty_values()), encoding="utf-8")
    with install([CHART / "values-cpu.yaml", values_path]) as release:
        apply_faster_rules(release)
        yield release


def make_faulty_values() -> dict[str, object]:
    """Return chart values that add FaultyEnvironment and set the scrape interval."""
    program_path = Path(faulty_environment.__file__)
    serve_command = (
        f'printf %s "$PROGRAM" > {program_path.name}; exec dumb-init -- python -m ludus.env "$@"'
    )
    environment = {
        "image": {"repository": "ludus/env-openspiel"},
        "command": ["sh", "-c", serve_command, "sh"],
        "package": f"{program_path.stem}:FaultyEnvironment",
        "env": [{"name": "PROGRAM", "value": program_path.read_text(encoding="utf-8")}],
        "capacity": CAPACITY,
        "drainSeconds": 1,
        "server": {"isolation": "process"},
        "resources": {"requests": {"cpu": "50m", "memory": "192Mi"}, "limits": {"memory": "1Gi"}},
    }
    return {
        "environments": {FAULTY_ENVIRONMENT: environment},
        "gateway": {"drainSeconds": 1, "sessions": {"queueTimeoutSeconds": 20}},
        "monitoring": {"monitors": {"enabled": True, "interval": SCRAPE_INTERVAL}},
    }


def wait_for_alerts(
    release: Release, *alerts: str, callback: Callable[[], object] = lambda: None
) -> None:
    """Wait until all alerts have fired; call `callback` once per second."""
    missing_alerts, deadline = set(alerts), time.monotonic() + ALERT_TIMEOUT_S
    while missing_alerts:
        time.sleep(1)
        callback()
        firing_alerts = list_firing_alerts(release.namespace)
        assert time.monotonic() < deadline, (
            f"{missing_alerts} did not fire; firing: {firing_alerts}"
        )
        for alert in missing_alerts & firing_alerts:
            missing_alerts.remove(alert)
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {alert}\n")


def scale_deployment(release: Release, deployment: str, replicas: int) -> None:
    """Set the number of pods of a Deployment, and wait until they are ready."""
    arguments = (deployment, f"--replicas={replicas}")
    kubectl("-n", release.namespace, "scale", *arguments)
    if replicas:
        release.wait_until_ready()


def make_server_selector(environment: str) -> str:
    """Return the label selector of an environment's servers.

    Client pods have only the second label.
    """
    return f"app.kubernetes.io/component=environment,ludus.dev/environment={environment}"


def kill_pods(release: Release, selector: str) -> None:
    """Kill all pods that match a label selector."""
    arguments = ("delete", "pods", "-l", selector, "--grace-period=0", "--force")
    kubectl("-n", release.namespace, *arguments)


def kill_ready_servers(release: Release, environment: str) -> None:
    """Kill the servers of an environment if all of them are ready."""
    deployment = release.get("deployment", f"ludus-env-{environment}")
    if deployment["status"].get("readyReplicas", 0) == deployment["spec"]["replicas"]:
        kill_pods(release, make_server_selector(environment))


# The fleet.


@pytest.mark.parametrize(
    ("behavior", "num_players", "alerts"),
    [
        ("occupy", 6 * CAPACITY, ("LudusFleetSaturated", "LudusOpensWait", "LudusOpensFail")),
        ("slow", CAPACITY, ("LudusStepsSlow",)),
        ("raise", 1, ("LudusCallsFail",)),
        ("exit", 2, ("LudusWorkersDie",)),
        ("unauthorized", 2, ("LudusTokensRefused",)),
    ],
)
def test_client_problems_fire_alerts(
    release: Release, behavior: str, num_players: int, alerts: tuple[str, ...]
) -> None:
    with run_client_pod(release, FAULTY_ENVIRONMENT, PLAYER_PROGRAM, behavior, str(num_players)):
        wait_for_alerts(release, *alerts)


def test_killed_server_fires_sessions_lost_alert(release: Release) -> None:
    with run_client_pod(release, FAULTY_ENVIRONMENT, PLAYER_PROGRAM, "hold", str(CAPACITY)):
        time.sleep(5)
        kill_pods(release, make_server_selector(FAULTY_ENVIRONMENT))
        wait_for_alerts(release, "LudusSessionsLost")


def test_missing_servers_fire_no_servers_alert(release: Release) -> None:
    scale_deployment(release, SERVER_DEPLOYMENT.format(FAULTY_ENVIRONMENT), 0)
    with run_client_pod(release, FAULTY_ENVIRONMENT, PLAYER_PROGRAM, "hold", "1"):
        wait_for_alerts(release, "LudusNoServers")
    scale_deployment(release, SERVER_DEPLOYMENT.format(FAULTY_ENVIRONMENT), 1)


def test_blocked_server_fires_unreachable_alerts(release: Release) -> None:
    policy = ("networkpolicy", f"ludus-env-{FAULTY_ENVIRONMENT}")
    ingress_rules = release.get(*policy)["spec"]["ingress"]
    try:
        patch_ingress_rules(release, policy, [])
        # Existing connections can survive the policy, so kill the servers.
        kill_pods(release, make_server_selector(FAULTY_ENVIRONMENT))
        wait_for_alerts(release, "LudusTargetDown", "LudusServersUnreachable")
    finally:
        patch_ingress_rules(release, policy, ingress_rules)


def patch_ingress_rules(
    release: Release, policy: tuple[str, ...], ingress: Iterable[object]
) -> None:
    """Replace the ingress rules of a network policy."""
    json_patch = [{"op": "replace", "path": "/spec/ingress", "value": ingress}]
    arguments = ("--type=json", "-p", json.dumps(json_patch))
    kubectl("-n", release.namespace, "patch", *policy, *arguments)


def test_missing_gateways_fire_alert(release: Release) -> None:
    scale_deployment(release, "deployment/ludus-gateway", 0)
    wait_for_alerts(release, "LudusGatewayMissing")
    scale_deployment(release, "deployment/ludus-gateway", 2)


# KubeRay.


@pytest.fixture(autouse=True)
def end_runs_after_test(release: Release) -> Iterator[None]:
    yield
    end_runs(release)


@pytest.fixture
def kuberay_monitor() -> Iterator[None]:
    """Apply the monitor of docs/dashboards.md during a test."""
    page = DASHBOARDS_PAGE.read_text(encoding="utf-8")
    (manifest,) = re.findall(r"```yaml\n(apiVersion.*?)```", page, re.DOTALL)
    kubectl("apply", "-f", "-", stdin=manifest)
    yield
    kubectl("delete", "-f", "-", stdin=manifest)


def test_failed_and_waiting_runs_fire_alerts(release: Release, kuberay_monitor: None) -> None:
    container = {"name": "ray", "image": "docker.io/ludus/trainer:dev"}
    head_group = {"rayStartParams": {}, "template": {"spec": {"containers": [container]}}}
    run_spec = {"suspend": True, "rayClusterSpec": {"headGroupSpec": head_group}}
    namespace = release.namespace
    # A suspended job without shutdownAfterJobFinishes is admitted, and KubeRay then fails it.
    create_object("ray.io/v1", "RayJob", "failing", namespace, spec=run_spec)
    create_object(
        "ray.io/v1",
        "RayJob",
        "waiting",
        namespace,
        spec=run_spec | {"shutdownAfterJobFinishes": True},
    )
    try:
        wait_until(
            lambda: fetch_series(f'kuberay_job_deployment_status{{namespace="{namespace}"}}'),
            "KubeRay metrics",
            ALERT_TIMEOUT_S,
        )
    except AssertionError:
        pytest.skip("SKIPPED, NOT PASSED: KubeRay has no metrics; start it with --enable-metrics")
    wait_for_alerts(release, "LudusRunFailed", "LudusRunWaits")


# Training.


def test_training_problems_fire_alerts(release: Release, tmp_path: Path) -> None:
    settings = (
        "training.num_steps=100000",
        "training.groups_per_step=64",
        "training.checkpoint_every_steps=100000",
        "eval.num_games=200",
        "eval.every_steps=100000",
    )
    with submit(release, tmp_path / "results", *settings) as training:
        training.wait_for_steps(3)
        # A kill loses episodes only while sessions are open, so kill repeatedly.
        kill_servers = partial(kill_ready_servers, release, BLACKJACK_ENVIRONMENT)
        wait_for_alerts(release, "LudusEpisodesVoided", callback=kill_servers)
        with fill_memory(release, training.find_pod("head")):
            wait_for_alerts(release, "LudusHeadMemoryHigh")
        scale_deployment(release, STORE_DEPLOYMENT, 0)
        time.sleep(STORE_OUTAGE_S)
        scale_deployment(release, STORE_DEPLOYMENT, 1)
        wait_for_alerts(release, "LudusWeightSyncSlow")
        with pause_repeatedly(
            release, make_server_selector(BLACKJACK_ENVIRONMENT), pause_s=2.5, run_s=0.3
        ):
            wait_for_alerts(release, "LudusLearnerIdle", "LudusCheckpointOld")
        scale_deployment(release, SERVER_DEPLOYMENT.format(BLACKJACK_ENVIRONMENT), 0)
        wait_for_alerts(release, "LudusTrainingStalled")
        scale_deployment(release, SERVER_DEPLOYMENT.format(BLACKJACK_ENVIRONMENT), 2)
        kubectl("-n", release.namespace, "delete", "pod", training.find_pod("learner"), "--force")
        wait_for_alerts(release, "LudusLearnerRestarted")
        kubectl("-n", release.namespace, "delete", "pod", training.find_pod("head"), "--force")
        wait_for_alerts(release, "LudusRunRetried")


def test_long_baseline_evaluation_fires_alert(release: Release, tmp_path: Path) -> None:
    with submit(release, tmp_path / "results", "name=slow", "eval.num_games=1000000"):
        wait_for_alerts(release, "LudusRunNotTraining")


def test_declining_policy_fires_alerts(release: Release, tmp_path: Path) -> None:
    settings = (
        "name=declining",
        "training.num_steps=100000",
        "training.groups_per_step=4",
        "training.max_staleness=24",
        # A higher rate makes the policy deterministic before the mismatch alert can fire.
        "learner.learning_rate=0.03",
        "learner.warmup_steps=0",
        "eval.num_games=200",
        "eval.num_games_during=1000",
        "eval.every_steps=40",
    )
    with submit(release, tmp_path / "results", *settings):
        wait_for_alerts(
            release,
            "LudusMismatchHigh",
            "LudusEvaluationFell",
            "LudusNoLearningSignal",
        )


@contextlib.contextmanager
def pause_repeatedly(
    release: Release, selector: str, *, pause_s: float, run_s: float
) -> Iterator[None]:
    """Pause and continue the main process of each pod repeatedly; kill the pods on exit."""
    # The main process is the child of the container's init process.
    shell_loop = (
        "for p in /proc/[0-9]*; do read -r _ _ _ parent _ < $p/stat;"
        ' [ "$parent" = 1 ] && n=${p#/proc/}; done;'
        f" while true; do kill -STOP $n; sleep {pause_s}; kill -CONT $n; sleep {run_s}; done"
    )
    pods = [pod["metadata"]["name"] for pod in release.get("pods", "-l", selector)["items"]]
    command = ("kubectl", "-n", release.namespace, "exec")
    processes = [subprocess.Popen([*command, pod, "--", "sh", "-c", shell_loop]) for pod in pods]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
        kill_pods(release, selector)


@contextlib.contextmanager
def fill_memory(release: Release, pod: str) -> Iterator[None]:
    """Run a process that fills the memory of a pod up to TARGET_MEMORY_SHARE."""
    program = (
        "import select, sys\n"
        "from ray._private.utils import get_system_memory, get_used_memory\n"
        "blocks = []\n"
        "while not select.select([sys.stdin], [], [], 0.02)[0]:\n"
        f"    if get_used_memory() < get_system_memory() * {TARGET_MEMORY_SHARE}:\n"
        "        blocks.append(b'1' * 2**24)\n"
    )
    command = ("kubectl", "-n", release.namespace, "exec", "-i", pod, "--", "python", "-c", program)
    # The process exits when its standard input is closed.
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        yield
