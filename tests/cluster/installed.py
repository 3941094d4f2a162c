"""Chart releases for tests, each in a new namespace that enforces Pod Security."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/ludus"
AUTOSCALING_VALUES = [CHART / "values-cpu.yaml", Path(__file__).with_name("autoscaling.yaml")]
TIMEOUT_S = 300.0


def find_skip_reason() -> str:
    """Return the reason to skip cluster tests on this machine, or '' if they can run."""
    if not os.environ.get("KUBECONFIG"):
        return "SKIPPED, NOT PASSED: no cluster; set KUBECONFIG and run `make cluster-test`"
    missing_programs = [
        program for program in ("kubectl", "helm") if _find_program(program) is None
    ]
    return (
        f"SKIPPED, NOT PASSED: {', '.join(missing_programs)} not found in PATH"
        if missing_programs
        else ""
    )


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    """Run kubectl and return its output; raise AssertionError with its stderr if it fails."""
    return _run_command([str(_find_program("kubectl")), *arguments], stdin)


def helm(*arguments: str) -> str:
    """Run helm and return its output; raise AssertionError with its stderr if it fails."""
    return _run_command([str(_find_program("helm")), *arguments])


def create_object(
    api_version: str,
    kind: str,
    name: str,
    namespace: str = "default",
    labels: Mapping[str, str] | None = None,
    **fields: Any,
) -> None:
    """Create an object. Kubernetes ignores `namespace` for cluster-wide kinds."""
    metadata = {"name": name, "namespace": namespace, "labels": dict(labels or {})}
    manifest = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}
    kubectl("create", "-f", "-", stdin=json.dumps(manifest))


@dataclass(frozen=True)
class Release:
    """An installed Helm release."""

    name: str
    namespace: str

    def get(self, kind: str, *options: str) -> Any:
        """Return the parsed output of `kubectl get KIND -o json` in the namespace."""
        return json.loads(kubectl("-n", self.namespace, "get", kind, *options, "-o", "json"))

    def upgrade(self, values: Sequence[Path], settings: Mapping[str, str] | None = None) -> None:
        """Install or upgrade the release, and wait until every pod is ready."""
        options = [option for path in values for option in ("--values", str(path))]
        options += [
            option for item in (settings or {}).items() for option in ("--set", "=".join(item))
        ]
        helm("upgrade", "--install", self.name, str(CHART), "-n", self.namespace, *options)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until every Deployment has finished its rollout.

        `helm --wait` would also wait for the runs' volume, which many clusters bind only when a pod
        first needs it.
        """
        for deployment in self.get("deployments")["items"]:
            name = f"deployment/{deployment['metadata']['name']}"
            timeout_option = f"--timeout={TIMEOUT_S:.0f}s"
            kubectl("-n", self.namespace, "rollout", "status", name, timeout_option)


@contextmanager
def create_namespace() -> Iterator[str]:
    """Create a namespace that enforces Pod Security and has the Secrets of values-cpu.yaml."""
    name = f"ludus-test-{secrets.token_hex(3)}"
    kubectl("create", "namespace", name)
    try:
        kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        for secret_name, keys in (
            ("ludus-auth", ("session-key", "gateway-token", "environment-token")),
            ("ludus-s3", ("access-key-id", "secret-access-key")),
        ):
            literals = [f"--from-literal={key}={secrets.token_hex(32)}" for key in keys]
            kubectl("-n", name, "create", "secret", "generic", secret_name, *literals)
        yield name
    except BaseException:
        sys.stderr.write(_describe_namespace(name))
        raise
    finally:
        kubectl("delete", "namespace", name, "--wait=false")


@contextmanager
def install(
    values: Sequence[Path], settings: Mapping[str, str] | None = None, name: str = "ludus"
) -> Iterator[Release]:
    """Install a release and yield it when its pods are ready; delete its namespace afterwards."""
    with create_namespace() as target_namespace:
        release = Release(name, target_namespace)
        release.upgrade(values, settings)
        yield release


def wait_until(condition: Any, goal: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {goal}"
        time.sleep(1)


def _describe_namespace(namespace: str) -> str:
    """Return the pods and recent events of a namespace as text."""
    report = ""
    for query in (("get", "pods", "-o", "wide"), ("get", "events", "--sort-by=.lastTimestamp")):
        report += subprocess.run(
            [str(_find_program("kubectl")), "-n", namespace, *query], capture_output=True, text=True
        ).stdout[-4000:]
    return report


def _find_program(name: str) -> str | None:
    packaged_path = Path(sys.executable).parent / name
    return str(packaged_path) if packaged_path.exists() else shutil.which(name)


def _run_command(command: list[str], stdin: str | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, input=stdin)
    assert result.returncode == 0, f"{' '.join(command[1:6])} ...: {result.stderr.strip()}"
    return result.stdout
