"""Pods of tests: the `helm test` pod with a test's client program, and pods with any labels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.cluster.installed import Release, create_object, helm, kubectl

POD_NAME = "player"
IMAGE = "docker.io/ludus/gateway:dev"
CONNECTION_PROGRAM = """
import concurrent.futures, socket, sys
def connect(host, port):
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return "denied"
    return "reached"
targets = sys.argv[1:]
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(*pool.map(connect, targets[::2], targets[1::2]))
"""
"""Program that tries to connect to each HOST PORT of its arguments."""


@contextmanager
def run_client_pod(
    release: Release, environment: str, program: Path, *arguments: str
) -> Iterator[tuple[str, ...]]:
    """Run `program ADDRESS ARGUMENTS` in a pod; yield the kubectl arguments for `exec` in it.

    ADDRESS is the gateway's address for the environment. LUDUS_ENV_TOKEN contains the gateway's
    token.
    """
    namespace_options = ("--namespace", release.namespace)
    hooks = yaml.safe_load_all(helm("get", "hooks", release.name, *namespace_options))
    (hook,) = (hook for hook in hooks if hook["metadata"]["name"].endswith(f"-test-{environment}"))
    hook["metadata"] |= {"name": POD_NAME, "annotations": {}}
    (container,) = hook["spec"]["containers"]
    address = next(argument for argument in container.pop("args") if argument.startswith("grpc://"))
    source = program.read_text(encoding="utf-8")
    container["command"] = ["python", "-c", source, address, *arguments]
    kubectl(*namespace_options, "apply", "-f", "-", stdin=json.dumps(hook))
    try:
        kubectl(
            *namespace_options, "wait", f"pod/{POD_NAME}", "--for=condition=Ready", "--timeout=120s"
        )
        yield (*namespace_options, "exec", POD_NAME, "--")
    finally:
        kubectl(*namespace_options, "delete", "pod", POD_NAME, "--grace-period=1")


def create_python_pod(
    namespace: str, name: str, program: Sequence[str], labels: Mapping[str, str] | None = None
) -> None:
    """Create a pod that runs a Python program, given as source and arguments, and then ends."""
    container = {
        "name": "python",
        "image": IMAGE,
        "command": ["python", "-c", *program],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "containers": [container],
    }
    create_object("v1", "Pod", name, namespace, labels, spec=spec)


def try_connections(namespace: str, pod: str, *targets: tuple[str, str]) -> list[str]:
    """Try a connection from a pod to each address and port; return "reached" or "denied" each."""
    words = [word for target in targets for word in target]
    command = ("exec", pod, "--", "python", "-c", CONNECTION_PROGRAM, *words)
    return kubectl("-n", namespace, *command).split()
