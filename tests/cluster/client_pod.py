"""A pod like that of `helm test`, which runs a program of a test instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.cluster.installed import Installed, helm, kubectl

NAME = "player"


@contextmanager
def client_pod(
    release: Installed, environment: str, program: Path, *words: str
) -> Iterator[tuple[str, ...]]:
    """What begins a kubectl command in the pod; it runs `program ADDRESS WORDS` until the end.

    The address is the gateway's for that environment, its token stands in LUDUS_ENV_TOKEN.
    """
    place = ("--namespace", release.namespace)
    hooks = yaml.safe_load_all(helm("get", "hooks", release.name, *place))
    (hook,) = (hook for hook in hooks if hook["metadata"]["name"].endswith(f"-test-{environment}"))
    hook["metadata"] |= {"name": NAME, "annotations": {}}
    (container,) = hook["spec"]["containers"]
    address = next(word for word in container.pop("args") if word.startswith("grpc://"))
    text = program.read_text(encoding="utf-8")
    container["command"] = ["python", "-c", text, address, *words]
    kubectl(*place, "apply", "-f", "-", given=json.dumps(hook))
    try:
        kubectl(*place, "wait", f"pod/{NAME}", "--for=condition=Ready", "--timeout=120s")
        yield (*place, "exec", NAME, "--")
    finally:
        kubectl(*place, "delete", "pod", NAME, "--grace-period=1")
