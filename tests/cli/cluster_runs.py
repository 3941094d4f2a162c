"""Runs on the fake cluster: what is done to them, and what they are asked."""

from __future__ import annotations

import io
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cli.commands import Outcome, RunCli
from tests.gateway.fake_kubernetes import Call, FakeKubernetes
from tests.gateway.fake_kubernetes_pods import Ran
from tests.report.synthetic_run import build_run
from tests.runs.cluster import (
    HEAD,
    begin,
    phase_row,
    set_status,
)
from tests.runs.release import NAMESPACE, Json

DOCS = Path(__file__).parents[2] / "docs" / "submit.md"
CONFIG = """
name = "demo"
[environment]
package = "openspiel_env"
options = {game = "blackjack"}
[training]
num_steps = 3
"""


def beyond_the_role(cluster: FakeKubernetes) -> set[tuple[str, str]]:
    """What was asked of the API server and is not in the documentation's Role."""
    (text,) = re.findall(r"```yaml\n(apiVersion: rbac.*?)```", DOCS.read_text(), re.DOTALL)
    allowed = {
        (verb, resource)
        for rule in yaml.safe_load(text)["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    } | {("list", "nodes")}
    of_namespace = [r for r in cluster.requests if r.target.namespace == NAMESPACE]
    parts = [(r.verb, f"{r.target.plural}/{r.target.part}".rstrip("/")) for r in of_namespace]
    return set(parts) - allowed


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Does something while a command runs, and waits for it."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        yield
        done.result()


def wait_for(call: Call, what: Callable[[FakeKubernetes], Any]) -> Any:
    deadline_s = time.monotonic() + 120
    while not (found := call(what)):
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.02)
    return found


def job_of(cluster: FakeKubernetes) -> Json | None:
    return cluster.get("ray.io/v1", "rayjobs", NAMESPACE, "demo")


def map_of(cluster: FakeKubernetes) -> Json | None:
    return cluster.get("v1", "configmaps", NAMESPACE, "demo-config")


def say(call: Call, *lines: str) -> None:
    call(lambda cluster: cluster.pods.say(HEAD, *lines))


def submitted(ludus: RunCli, call: Call) -> None:
    """A run that waits for KubeRay."""
    assert ludus("submit", "run.toml", "--detach").code == 0
    assert call(job_of) is not None


def running(ludus: RunCli, call: Call, *lines: str) -> None:
    """A run whose driver has said these lines."""
    submitted(ludus, call)
    call(begin)
    say(call, phase_row(), *lines)


def ended(call: Call, status: str = "SUCCEEDED", deployment: str = "Complete", **more: Any) -> None:
    call(lambda c: set_status(c, jobStatus=status, jobDeploymentStatus=deployment, **more))


def packed(folder: Path) -> bytes:
    """The folder of a run as it comes from the volume."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in folder.iterdir():
            archive.add(path, arcname=path.name)
    return buffer.getvalue()


def has_results(call: Call, tmp_path: Path) -> list[list[str]]:
    """The volume holds what a whole run leaves; the commands that are run there."""
    build_run(tmp_path / "volume")
    content, asked = packed(tmp_path / "volume"), []

    def run(pod: str, command: list[str]) -> Ran:
        asked.append(command)
        return Ran(out=content)

    call(lambda cluster: setattr(cluster.pods, "run", run))
    return asked


def one_error(outcome: Outcome, code: int = 2) -> str:
    """The sentence with which a command ended."""
    assert outcome.code == code, outcome
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert "secret-token" not in outcome.err
    return errors[0]
