"""Each alert's condition, caused on the cluster; its real Prometheus tells of it.

By a clock that runs faster (faster_rules.py). LudusCanaryFailed and LudusWeightsDiffer are not
here: nothing that can be done to a cluster from outside gives a worker other weights than it says.
Nor is LudusEpisodesFailed: the run that is trained here plays in an environment without faults.
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
from tests.cluster.client_pod import client_pod
from tests.cluster.faster_rules import INTERVAL, apply_faster_rules
from tests.cluster.installed import (
    CHART,
    ROOT,
    Installed,
    create,
    installed,
    kubectl,
    until,
    why_not,
)
from tests.cluster.prometheus import ask, firing, is_there
from tests.cluster.training import end_runs, submitted

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
PATIENCE_S = 180.0
CAPACITY = 4
FAULTY, BLACKJACK = "faulty", "blackjack"
PLAYER = Path(fault_player.__file__)
SERVERS = "deployment/ludus-env-{}"
STORE = "deployment/ludus-store"
STORE_AWAY_S = 25.0
DASHBOARDS_PAGE = ROOT / "docs" / "dashboards.md"
EDGE_OF_MEMORY = 0.93
"""Ray itself begins to end workers at 0.95."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    if not is_there():
        pytest.skip("SKIPPED, NOT PASSED: no Prometheus operator is installed")
    values = tmp_path_factory.mktemp("values") / "faulty.yaml"
    values.write_text(yaml.safe_dump(faulty_values()), encoding="utf-8")
    with installed([CHART / "values-cpu.yaml", values]) as found:
        apply_faster_rules(found)
        yield found


def faulty_values() -> dict[str, object]:
    """Beside blackjack, an environment from this folder; and scrapes that follow the rules."""
    program = Path(faulty_environment.__file__)
    serve = f'printf %s "$PROGRAM" > {program.name}; exec dumb-init -- python -m ludus.env "$@"'
    environment = {
        "image": {"repository": "ludus/env-openspiel"},
        "command": ["sh", "-c", serve, "sh"],
        "package": f"{program.stem}:FaultyEnvironment",
        "env": [{"name": "PROGRAM", "value": program.read_text(encoding="utf-8")}],
        "capacity": CAPACITY,
        "drainSeconds": 1,
        "server": {"isolation": "process"},
        "resources": {"requests": {"cpu": "50m", "memory": "192Mi"}, "limits": {"memory": "1Gi"}},
    }
    return {
        "environments": {FAULTY: environment},
        "gateway": {"drainSeconds": 1, "sessions": {"queueTimeoutSeconds": 20}},
        "monitoring": {"monitors": {"enabled": True, "interval": INTERVAL}},
    }


def tells_of(
    release: Installed, *alerts: str, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Return once each of the alerts has been firing; each second something may be done."""
    missing, deadline = set(alerts), time.monotonic() + PATIENCE_S
    while missing:
        time.sleep(1)
        meanwhile()
        told = firing(release.namespace)
        assert time.monotonic() < deadline, f"{missing} are silent; firing: {told}"
        for alert in missing & told:
            missing.remove(alert)
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {alert}\n")


def scale(release: Installed, deployment: str, replicas: int) -> None:
    """Set a number of pods and, where there are some, wait for them."""
    words = (deployment, f"--replicas={replicas}")
    kubectl("-n", release.namespace, "scale", *words)
    if replicas:
        release.wait_until_ready()


def servers_of(environment: str) -> str:
    """The labels of an environment's servers; who plays there has the second one, too."""
    return f"app.kubernetes.io/component=environment,ludus.dev/environment={environment}"


def kill_pods(release: Installed, labels: str) -> None:
    """Kill all pods with these labels at once."""
    words = ("delete", "pods", "-l", labels, "--grace-period=0", "--force")
    kubectl("-n", release.namespace, *words)


def kill_if_ready(release: Installed, environment: str) -> None:
    """Kill all servers of an environment if none of them is only starting."""
    deployment = release.get("deployment", f"ludus-env-{environment}")
    if deployment["status"].get("readyReplicas", 0) == deployment["spec"]["replicas"]:
        kill_pods(release, servers_of(environment))


# The fleet.


@pytest.mark.parametrize(
    ("trouble", "num_players", "alerts"),
    [
        ("crowd", 6 * CAPACITY, ("LudusFleetSaturated", "LudusOpensWait", "LudusOpensFail")),
        ("slow", CAPACITY, ("LudusStepsSlow",)),
        ("raise", 1, ("LudusCallsFail",)),
        ("die", 2, ("LudusWorkersDie",)),
        ("refused", 2, ("LudusTokensRefused",)),
    ],
)
def test_players_are_the_cause(
    release: Installed, trouble: str, num_players: int, alerts: tuple[str, ...]
) -> None:
    with client_pod(release, FAULTY, PLAYER, trouble, str(num_players)):
        tells_of(release, *alerts)


def test_a_server_is_killed_with_its_sessions(release: Installed) -> None:
    with client_pod(release, FAULTY, PLAYER, "hold", str(CAPACITY)):
        time.sleep(5)
        kill_pods(release, servers_of(FAULTY))
        tells_of(release, "LudusSessionsLost")


def test_there_is_no_server(release: Installed) -> None:
    scale(release, SERVERS.format(FAULTY), 0)
    with client_pod(release, FAULTY, PLAYER, "hold", "1"):
        tells_of(release, "LudusNoServers")
    scale(release, SERVERS.format(FAULTY), 1)


def test_the_network_lets_nobody_to_a_server(release: Installed) -> None:
    policy = ("networkpolicy", f"ludus-env-{FAULTY}")
    told = release.get(*policy)["spec"]["ingress"]
    try:
        patch(release, policy, [])
        # Connections that there are may be let live.
        kill_pods(release, servers_of(FAULTY))
        tells_of(release, "LudusTargetDown", "LudusServersUnreachable")
    finally:
        patch(release, policy, told)


def patch(release: Installed, policy: tuple[str, ...], ingress: Iterable[object]) -> None:
    """Replace what a policy lets in."""
    change = [{"op": "replace", "path": "/spec/ingress", "value": ingress}]
    words = ("--type=json", "-p", json.dumps(change))
    kubectl("-n", release.namespace, "patch", *policy, *words)


def test_the_gateways_are_gone(release: Installed) -> None:
    scale(release, "deployment/ludus-gateway", 0)
    tells_of(release, "LudusGatewayMissing")
    scale(release, "deployment/ludus-gateway", 2)


# KubeRay.


@pytest.fixture(autouse=True)
def no_run_afterwards(release: Installed) -> Iterator[None]:
    yield
    end_runs(release)


@pytest.fixture
def kuberay_monitor() -> Iterator[None]:
    """The monitor that docs/dashboards.md shows."""
    page = DASHBOARDS_PAGE.read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(apiVersion.*?)```", page, re.DOTALL)
    kubectl("apply", "-f", "-", given=shown)
    yield
    kubectl("delete", "-f", "-", given=shown)


def test_runs_fail_and_wait(release: Installed, kuberay_monitor: None) -> None:
    container = {"name": "ray", "image": "docker.io/ludus/trainer:dev"}
    head = {"rayStartParams": {}, "template": {"spec": {"containers": [container]}}}
    waits = {"suspend": True, "rayClusterSpec": {"headGroupSpec": head}}
    place = release.namespace
    # KubeRay suspends only what it may take away, and says so after it was admitted.
    create("ray.io/v1", "RayJob", "fails", place, spec=waits)
    create("ray.io/v1", "RayJob", "waits", place, spec=waits | {"shutdownAfterJobFinishes": True})
    try:
        until(
            lambda: ask(f'kuberay_job_deployment_status{{namespace="{place}"}}'),
            "metrics",
            PATIENCE_S,
        )
    except AssertionError:
        pytest.skip("SKIPPED, NOT PASSED: KubeRay has no metrics; start it with --enable-metrics")
    tells_of(release, "LudusRunFailed", "LudusRunWaits")


# Training.


def test_a_run_has_every_trouble(release: Installed, tmp_path: Path) -> None:
    settings = (
        "training.num_steps=100000",
        "training.groups_per_step=64",
        "training.checkpoint_every_steps=100000",
        "eval.num_games=200",
        "eval.every_steps=100000",
    )
    with submitted(release, tmp_path / "results", *settings) as training:
        training.go_on(3)
        # Not at every moment does somebody play.
        again = partial(kill_if_ready, release, BLACKJACK)
        tells_of(release, "LudusEpisodesVoided", meanwhile=again)
        with memory_of(release, training.pod_of("head")):
            tells_of(release, "LudusHeadMemoryHigh")
        scale(release, STORE, 0)
        time.sleep(STORE_AWAY_S)
        scale(release, STORE, 1)
        tells_of(release, "LudusWeightSyncSlow")
        with halting(release, servers_of(BLACKJACK), stop_s=2.5, go_s=0.3):
            tells_of(release, "LudusLearnerIdle", "LudusCheckpointOld")
        scale(release, SERVERS.format(BLACKJACK), 0)
        tells_of(release, "LudusTrainingStalled")
        scale(release, SERVERS.format(BLACKJACK), 2)
        kubectl("-n", release.namespace, "delete", "pod", training.pod_of("learner"), "--force")
        tells_of(release, "LudusLearnerRestarted")
        kubectl("-n", release.namespace, "delete", "pod", training.pod_of("head"), "--force")
        tells_of(release, "LudusRunRetried")


def test_a_run_plays_baselines_for_long(release: Installed, tmp_path: Path) -> None:
    with submitted(release, tmp_path / "results", "name=slow", "eval.num_games=1000000"):
        tells_of(release, "LudusRunNotTraining")


def test_a_run_unlearns(release: Installed, tmp_path: Path) -> None:
    settings = (
        "name=wild",
        "training.num_steps=100000",
        "training.groups_per_step=4",
        "training.max_staleness=24",
        # More, and the policy is certain of one move before the mismatch has lasted.
        "learner.learning_rate=0.03",
        "learner.warmup_steps=0",
        "eval.num_games=200",
        "eval.num_games_during=1000",
        "eval.every_steps=40",
    )
    with submitted(release, tmp_path / "results", *settings):
        tells_of(
            release,
            "LudusMismatchHigh",
            "LudusEvaluationFell",
            "LudusNoLearningSignal",
        )


@contextlib.contextmanager
def halting(release: Installed, labels: str, *, stop_s: float, go_s: float) -> Iterator[None]:
    """Pods whose program stands still again and again; they are new ones afterwards."""
    # The program is what the container's init has started.
    loop = (
        "for p in /proc/[0-9]*; do read -r _ _ _ parent _ < $p/stat;"
        ' [ "$parent" = 1 ] && n=${p#/proc/}; done;'
        f" while true; do kill -STOP $n; sleep {stop_s}; kill -CONT $n; sleep {go_s}; done"
    )
    pods = [pod["metadata"]["name"] for pod in release.get("pods", "-l", labels)["items"]]
    command = ("kubectl", "-n", release.namespace, "exec")
    loops = [subprocess.Popen([*command, pod, "--", "sh", "-c", loop]) for pod in pods]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()
        kill_pods(release, labels)


@contextlib.contextmanager
def memory_of(release: Installed, pod: str) -> Iterator[None]:
    """A process that takes nearly all the memory that is left in a pod."""
    program = (
        "import select, sys\n"
        "from ray._private.utils import get_system_memory, get_used_memory\n"
        "taken = []\n"
        "while not select.select([sys.stdin], [], [], 0.02)[0]:\n"
        f"    if get_used_memory() < get_system_memory() * {EDGE_OF_MEMORY}:\n"
        "        taken.append(b'1' * 2**24)\n"
    )
    command = ("kubectl", "-n", release.namespace, "exec", "-i", pod, "--", "python", "-c", program)
    # It ends with its input.
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        yield
