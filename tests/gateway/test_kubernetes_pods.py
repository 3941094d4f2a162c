"""Pod logs and commands in pods, through the Kubernetes API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.api import KubernetesApi, make_resource_path
from tests.gateway.cluster_objects import NAMESPACE, make_api_client
from tests.gateway.fake_kubernetes import FakeKubernetes
from tests.gateway.fake_kubernetes_pods import CommandResult

LOG_PATH = make_resource_path("v1", NAMESPACE, "pods", "head") + "/log"


@pytest.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as cluster:
        yield cluster


@pytest.fixture
async def api(cluster: FakeKubernetes) -> AsyncIterator[KubernetesApi]:
    async with make_api_client(cluster) as api:
        yield api


async def run_command(api: KubernetesApi) -> bytes:
    async with aclosing(api.run_command(NAMESPACE, "head", "ray", ("ls", "/"))) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def test_a_log_is_read_line_by_line(cluster: FakeKubernetes, api: KubernetesApi) -> None:
    cluster.pods.append_log("head", "one", "", "zwei ✓")
    assert [line async for line in api.read_lines(LOG_PATH, {})] == ["one", "", "zwei ✓"]


async def test_growing_log_is_streamed(cluster: FakeKubernetes, api: KubernetesApi) -> None:
    cluster.pods.append_log("head", "one")
    received_lines = []
    async with aclosing(api.read_lines(LOG_PATH, {"follow": "true"})) as lines:
        async for line in lines:
            received_lines.append(line)
            if line == "one":
                cluster.pods.append_log("head", "two")
            else:
                break
    assert received_lines == ["one", "two"]


async def test_missing_log_is_reported(api: KubernetesApi) -> None:
    with pytest.raises(ClusterError, match="waiting to start") as error:
        _ = [line async for line in api.read_lines(LOG_PATH, {})]
    assert error.value.status == 400


async def test_output_of_a_command_is_complete(cluster: FakeKubernetes, api: KubernetesApi) -> None:
    commands = []

    def record_command(pod: str, command: list[str]) -> CommandResult:
        commands.append((pod, command))
        return CommandResult(output=bytes(range(256)) * 40, error_output="a warning\n")

    cluster.pods.run = record_command
    assert await run_command(api) == bytes(range(256)) * 40
    assert commands == [("head", ["ls", "/"])]


async def test_failed_command_is_reported_with_its_stderr(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    cluster.pods.run = lambda pod, command: CommandResult(
        error_output="no such file\n", exit_code=2
    )
    with pytest.raises(ClusterError, match=f"pod {NAMESPACE}/head failed: no such file$"):
        await run_command(api)
    cluster.pods.run = lambda pod, command: CommandResult(exit_code=3)
    with pytest.raises(ClusterError, match="non-zero exit code 3"):
        await run_command(api)


async def test_forbidden_command_is_reported_with_a_remedy(
    cluster: FakeKubernetes,
) -> None:
    cluster.tokens = {"another"}
    async with make_api_client(cluster) as api:
        with pytest.raises(ClusterError, match=r"401 .*; check the service account") as error:
            await run_command(api)
    assert error.value.status == 401
