"""A pod that runs a test's client program, with the specification of the `helm test` pod."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.cluster.installed import Release, helm, kubectl

POD_NAME = "player"


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
