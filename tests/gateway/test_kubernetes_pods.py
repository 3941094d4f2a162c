"""Logs of pods, and commands in them, through the API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.api import KubernetesApi, resource_path
from ludus.services.kubernetes.exec import stream_command_output
from tests.gateway.cluster_objects import NAMESPACE, client_of
from tests.gateway.fake_kubernetes import FakeKubernetes
from tests.gateway.fake_kubernetes_pods import Ran

LOG = resource_path("v1", NAMESPACE, "pods", "head") + "/log"


@pytest.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as cluster:
        yield cluster


@pytest.fixture
async def api(cluster: FakeKubernetes) -> AsyncIterator[KubernetesApi]:
    async with client_of(cluster) as api:
        yield api


async def ran(api: KubernetesApi) -> bytes:
    async with aclosing(stream_command_output(api, NAMESPACE, "head", "ray", ("ls", "/"))) as parts:
        return b"".join([part async for part in parts])


async def test_a_log_is_read_line_by_line(cluster: FakeKubernetes, api: KubernetesApi) -> None:
    cluster.pods.say("head", "one", "", "zwei ✓")
    assert [line async for line in api.lines(LOG, {})] == ["one", "", "zwei ✓"]


async def test_a_log_is_followed_as_it_grows(cluster: FakeKubernetes, api: KubernetesApi) -> None:
    cluster.pods.say("head", "one")
    seen = []
    async with aclosing(api.lines(LOG, {"follow": "true"})) as lines:
        async for line in lines:
            seen.append(line)
            if line == "one":
                cluster.pods.say("head", "two")
            else:
                break
    assert seen == ["one", "two"]


async def test_a_log_that_is_not_there_says_why(api: KubernetesApi) -> None:
    with pytest.raises(ClusterError, match="waiting to start") as caught:
        _ = [line async for line in api.lines(LOG, {})]
    assert caught.value.status == 400


async def test_what_a_command_writes_comes_whole(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    asked = []

    def run(pod: str, command: list[str]) -> Ran:
        asked.append((pod, command))
        return Ran(out=bytes(range(256)) * 40, err="by the way\n")

    cluster.pods.run = run
    assert await ran(api) == bytes(range(256)) * 40
    assert asked == [("head", ["ls", "/"])]


async def test_a_command_that_fails_says_what_it_said(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    cluster.pods.run = lambda pod, command: Ran(err="no such file\n", code=2)
    with pytest.raises(ClusterError, match=f"pod {NAMESPACE}/head failed: no such file$"):
        await ran(api)
    cluster.pods.run = lambda pod, command: Ran(code=3)
    with pytest.raises(ClusterError, match="non-zero exit code 3"):
        await ran(api)


async def test_a_command_that_may_not_be_run_says_what_is_needed(
    cluster: FakeKubernetes,
) -> None:
    cluster.tokens = {"another"}
    async with client_of(cluster) as api:
        with pytest.raises(ClusterError, match=r"401 .*; check the service account") as caught:
            await ran(api)
    assert caught.value.status == 401
