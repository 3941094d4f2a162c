"""Helpers that start, finish and query runs on the fake cluster."""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ludus.proto.runs import CONFIG_FILE, RUN_ID_FILE
from tests.cli.commands import Outcome, RunCli
from tests.gateway.fake_kubernetes import Call, FakeKubernetes
from tests.gateway.fake_kubernetes_pods import CommandResult
from tests.report.synthetic_run import build_run
from tests.runs.cluster import (
    HEAD,
    format_phase_line,
    set_status,
    start_cluster,
)
from tests.runs.release import NAMESPACE, Json

SUBMIT_PAGE = Path(__file__).parents[2] / "docs" / "submit.md"
POLL_TIMEOUT_S = 120
CONFIG = """
name = "demo"
[environment]
package = "openspiel_env"
options = {game = "blackjack"}
[training]
num_steps = 3
"""


def find_requests_beyond_role(cluster: FakeKubernetes) -> set[tuple[str, str]]:
    """Return the API requests that the Role in docs/submit.md does not allow."""
    (role_yaml,) = re.findall(
        r"```yaml\n(apiVersion: rbac.*?)```", SUBMIT_PAGE.read_text(), re.DOTALL
    )
    allowed_requests = {
        (verb, resource)
        for rule in yaml.safe_load(role_yaml)["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    } | {("list", "nodes")}
    namespace_requests = [r for r in cluster.requests if r.target.namespace == NAMESPACE]
    used_requests = {
        (r.verb, f"{r.target.plural}/{r.target.subresource}".rstrip("/"))
        for r in namespace_requests
    }
    return used_requests - allowed_requests


@contextmanager
def run_in_background(function: Callable[[], None]) -> Iterator[None]:
    """Run `function` in a background thread, and join the thread on exit."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        yield
        future.result()


def poll(call: Call, condition: Callable[[FakeKubernetes], Any]) -> Any:
    deadline = time.monotonic() + POLL_TIMEOUT_S
    while not (result := call(condition)):
        assert time.monotonic() < deadline, f"condition not met within {POLL_TIMEOUT_S} s"
        time.sleep(0.02)
    return result


def get_job(cluster: FakeKubernetes) -> Json | None:
    return cluster.get("ray.io/v1", "rayjobs", NAMESPACE, "demo")


def get_config_map(cluster: FakeKubernetes) -> Json | None:
    return cluster.get("v1", "configmaps", NAMESPACE, "demo-config")


def append_log(call: Call, *lines: str) -> None:
    call(lambda cluster: cluster.pods.append_log(HEAD, *lines))


def submit_run(ludus: RunCli, call: Call) -> None:
    """Submit a run without waiting for it to start."""
    assert ludus("submit", "run.toml", "--detach").code == 0
    assert call(get_job) is not None


def start_run(ludus: RunCli, call: Call, *lines: str) -> None:
    """Submit a run, start its cluster and write `lines` to the driver log."""
    submit_run(ludus, call)
    call(start_cluster)
    append_log(call, format_phase_line(), *lines)


def finish_run(
    call: Call, status: str = "SUCCEEDED", deployment: str = "Complete", **fields: Any
) -> None:
    call(lambda c: set_status(c, jobStatus=status, jobDeploymentStatus=deployment, **fields))


def pack_folder(folder: Path) -> bytes:
    """Return the contents of a run folder as a tar.gz archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in folder.iterdir():
            archive.add(path, arcname=path.name)
    return buffer.getvalue()


def add_results(call: Call, tmp_path: Path, run_id: str = "") -> list[list[str]]:
    """Make pod commands output a packed run folder; return the list that records the commands."""
    build_run(tmp_path / "volume")
    config_path = tmp_path / "volume" / CONFIG_FILE
    config = {**json.loads(config_path.read_text()), "output_dir": "/runs"}
    config_path.write_text(json.dumps(config))
    if run_id:
        (tmp_path / "volume" / RUN_ID_FILE).write_text(run_id)
    content, commands = pack_folder(tmp_path / "volume"), []

    def run_command(pod: str, command: list[str]) -> CommandResult:
        commands.append(command)
        return CommandResult(output=content)

    call(lambda cluster: setattr(cluster.pods, "run", run_command))
    return commands


def read_error(outcome: Outcome, code: int = 2) -> str:
    """Assert that a command printed exactly one error; return the message."""
    assert outcome.code == code, outcome
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert "secret-token" not in outcome.err
    return errors[0]
