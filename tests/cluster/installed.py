"""The chart, installed for a test in a namespace of its own that enforces Pod Security."""

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


def why_not() -> str:
    """What keeps a test of a real cluster from running here; empty where nothing does."""
    if not os.environ.get("KUBECONFIG"):
        return "SKIPPED, NOT PASSED: no cluster; set KUBECONFIG, and `make cluster-test`"
    missing = [program for program in ("kubectl", "helm") if _program(program) is None]
    return f"SKIPPED, NOT PASSED: {', '.join(missing)} not found in PATH" if missing else ""


def kubectl(*arguments: str, given: str | None = None) -> str:
    """What kubectl says; its complaint is the error."""
    return _run([str(_program("kubectl")), *arguments], given)


def helm(*arguments: str) -> str:
    """What helm says; its complaint is the error."""
    return _run([str(_program("helm")), *arguments])


def create(api_version: str, kind: str, name: str, namespace: str = "default", **rest: Any) -> None:
    """Create an object; where its kind belongs to no namespace, none is looked at."""
    metadata = {"name": name, "namespace": namespace}
    given = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest}
    kubectl("create", "-f", "-", given=json.dumps(given))


@dataclass(frozen=True)
class Installed:
    """A release in its namespace."""

    name: str
    namespace: str

    def get(self, kind: str, *more: str) -> Any:
        """Objects of the namespace, as `kubectl get -o json` gives them."""
        return json.loads(kubectl("-n", self.namespace, "get", kind, *more, "-o", "json"))

    def upgrade(self, values: Sequence[Path], settings: Mapping[str, str] | None = None) -> None:
        """Install or upgrade, and wait until every pod is ready."""
        words = [word for path in values for word in ("--values", str(path))]
        words += [word for item in (settings or {}).items() for word in ("--set", "=".join(item))]
        helm("upgrade", "--install", self.name, str(CHART), "-n", self.namespace, *words)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Return once every pod is the newest and ready.

        Not `helm --wait`, which waits for the runs' volume, too; many clusters bind a volume when
        a pod first needs it.
        """
        for deployment in self.get("deployments")["items"]:
            name = f"deployment/{deployment['metadata']['name']}"
            limit = f"--timeout={TIMEOUT_S:.0f}s"
            kubectl("-n", self.namespace, "rollout", "status", name, limit)


@contextmanager
def namespace() -> Iterator[str]:
    """A namespace that enforces Pod Security and has the Secrets that values-cpu.yaml names."""
    name = f"ludus-test-{secrets.token_hex(3)}"
    kubectl("create", "namespace", name)
    try:
        kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        for secret, keys in (
            ("ludus-auth", ("session-key", "gateway-token", "environment-token")),
            ("ludus-s3", ("access-key-id", "secret-access-key")),
        ):
            literals = [f"--from-literal={key}={secrets.token_hex(32)}" for key in keys]
            kubectl("-n", name, "create", "secret", "generic", secret, *literals)
        yield name
    except BaseException:
        sys.stderr.write(_state(name))
        raise
    finally:
        kubectl("delete", "namespace", name, "--wait=false")


@contextmanager
def installed(
    values: Sequence[Path], settings: Mapping[str, str] | None = None, name: str = "ludus"
) -> Iterator[Installed]:
    """A release whose pods are ready; its namespace is gone afterwards."""
    with namespace() as place:
        release = Installed(name, place)
        release.upgrade(values, settings)
        yield release


def until(condition: Any, what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Return once `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(1)


def _state(namespace: str) -> str:
    """What a person would look at first."""
    said = ""
    for words in (("get", "pods", "-o", "wide"), ("get", "events", "--sort-by=.lastTimestamp")):
        said += subprocess.run(
            [str(_program("kubectl")), "-n", namespace, *words], capture_output=True, text=True
        ).stdout[-4000:]
    return said


def _program(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def _run(command: list[str], given: str | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, input=given)
    assert result.returncode == 0, f"{' '.join(command[1:6])} ...: {result.stderr.strip()}"
    return result.stdout
