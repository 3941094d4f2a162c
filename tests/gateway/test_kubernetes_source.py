"""Discovery of a Service's pods, including recovery from API server failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from ludus.proto.errors import ConfigError
from ludus.services.gateway.config import KubernetesEnvironment
from ludus.services.gateway.fleet.sources import ServerEndpoint
from ludus.services.gateway.kubernetes.source import (
    EndpointSliceSource,
)
from tests.env.polling import wait_until
from tests.gateway.cluster_objects import (
    NAMESPACE,
    SLICES,
    make_api_client,
    make_endpoint_slice,
    make_server_id,
    member,
)
from tests.gateway.fake_kubernetes import FakeKubernetes

ENVIRONMENT = KubernetesEnvironment(namespace=NAMESPACE, service="blackjack")
RETRY_PAUSES_S = (0.01, 0.05)
"""First and longest pause before a retry."""


@dataclass
class Publications:
    """Server lists that a source has published."""

    lists: list[Sequence[ServerEndpoint]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def endpoints(self) -> dict[str, ServerEndpoint]:
        return {endpoint.pod_name: endpoint for endpoint in self.lists[-1]}

    async def wait_for_pods(self, *pods: str) -> None:
        await wait_until(
            lambda: self.task.done() or (self.lists and set(self.endpoints) == set(pods))
        )
        assert not self.task.done(), f"the source stopped: {self.task}"


@asynccontextmanager
async def watch_service(cluster: FakeKubernetes) -> AsyncIterator[Publications]:
    publications = Publications()
    async with make_api_client(cluster) as api:
        source = EndpointSliceSource(api, ENVIRONMENT, dict, pauses_s=RETRY_PAUSES_S)
        publications.task = asyncio.create_task(source.watch(publications.lists.append))
        try:
            yield publications
            assert not publications.task.done(), f"the source stopped: {publications.task}"
        finally:
            publications.task.cancel()
            await asyncio.gather(publications.task, return_exceptions=True)
            await source.close()


@pytest.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as cluster:
        yield cluster


async def test_pod_is_published_with_addresses_and_server_id(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(make_endpoint_slice("s1", member("a", "10.0.0.7")))
    async with watch_service(cluster) as publications:
        await publications.wait_for_pods("a")
    assert publications.endpoints["a"] == ServerEndpoint(
        key=make_server_id("a"),
        grpc_address="grpc://10.0.0.7:18000",
        http_address="http://10.0.0.7:8000",
        server_id=make_server_id("a"),
        pod_name="a",
    )


async def test_pods_of_all_slices_of_the_service_are_published(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(make_endpoint_slice("other", member("x"), service="chess"))
    async with watch_service(cluster) as publications:
        await publications.wait_for_pods()
        cluster.put(make_endpoint_slice("s1", member("a"), member("b")))
        await publications.wait_for_pods("a", "b")
        cluster.put(make_endpoint_slice("s2", member("c")))
        cluster.put(make_endpoint_slice("more", member("y"), service="chess"))
        await publications.wait_for_pods("a", "b", "c")
        cluster.put(make_endpoint_slice("s1", member("b")))
        await publications.wait_for_pods("b", "c")
        cluster.remove(*SLICES, "s2")
        await publications.wait_for_pods("b")


async def test_first_publication_waits_for_a_successful_list(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(make_endpoint_slice("s1", member("a")))
    cluster.fail(500, verb="list", times=2)
    cluster.fail(403, verb="list", times=10**6)
    async with watch_service(cluster) as publications:
        await wait_until(lambda: cluster.num_requests("list") >= 4)
        assert publications.lists == []
        cluster.clear_failures()
        await publications.wait_for_pods("a")


async def test_service_with_wrong_ports_fails_at_the_start(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(make_endpoint_slice("s1", member("a"), ports={"web": 80, "metrics": 90}))
    async with make_api_client(cluster) as api:
        source = EndpointSliceSource(api, ENVIRONMENT, dict, pauses_s=RETRY_PAUSES_S)
        with pytest.raises(ConfigError, match="got web=80, metrics=90"):
            await asyncio.wait_for(source.watch(lambda _: None), 60)


@pytest.mark.parametrize("is_relisted", [False, True])
async def test_last_valid_state_of_an_invalid_slice_is_kept(
    cluster: FakeKubernetes, caplog: pytest.LogCaptureFixture, is_relisted: bool
) -> None:
    cluster.put(make_endpoint_slice("s1", member("a")))
    async with watch_service(cluster) as publications:
        await publications.wait_for_pods("a")
        cluster.put(make_endpoint_slice("s1", member("a"), ports={"web": 80, "metrics": 90}))
        if is_relisted:
            cluster.expire_watches()
        cluster.put(make_endpoint_slice("s2", member("b")))
        await publications.wait_for_pods("a", "b")
    assert "rename the Service's ports" in caplog.text


async def test_malformed_object_is_logged_and_skipped(
    cluster: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.put(make_endpoint_slice("s1", member("a")))
    async with watch_service(cluster) as publications:
        await publications.wait_for_pods("a")
        await wait_until(lambda: cluster.num_watches)
        cluster.put(make_endpoint_slice("s2", {"conditions": {}}))
        await wait_until(lambda: "unexpected form: KeyError('addresses')" in caplog.text)
        cluster.put(make_endpoint_slice("s3", member("b")))
        await publications.wait_for_pods("a", "b")


async def test_interrupted_watch_continues_without_a_new_list(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(make_endpoint_slice("s1", member("a")))
    async with watch_service(cluster) as publications:
        await wait_until(lambda: cluster.num_watches)
        for pod in "bcdef":
            cluster.cut_watches()
            cluster.put(make_endpoint_slice(f"s-{pod}", member(pod)))
            await wait_until(lambda pod=pod: pod in publications.endpoints)
        await publications.wait_for_pods(*"abcdef")
    assert cluster.num_requests("list") == 1


@pytest.mark.parametrize("refuses_old_watches", [False, True])
async def test_outdated_watch_causes_a_new_list_and_misses_no_change(
    cluster: FakeKubernetes, refuses_old_watches: bool
) -> None:
    cluster.refuses_old_watches = refuses_old_watches
    cluster.put(make_endpoint_slice("s1", member("a")))
    cluster.put(make_endpoint_slice("s2", member("b")))
    async with watch_service(cluster) as publications:
        await wait_until(lambda: cluster.num_watches)
        cluster.fail(503, verb="watch", times=1)
        cluster.cut_watches()
        cluster.remove(*SLICES, "s1")
        cluster.put(make_endpoint_slice("s3", member("c")))
        cluster.compact()
        await publications.wait_for_pods("b", "c")
    assert cluster.num_requests("list") == 2


async def test_expired_watch_causes_a_new_list(cluster: FakeKubernetes) -> None:
    async with watch_service(cluster) as publications:
        await wait_until(lambda: cluster.num_watches)
        cluster.expire_watches()
        await wait_until(lambda: cluster.num_requests("list") == 2 and cluster.num_watches)
        cluster.put(make_endpoint_slice("s1", member("a")))
        await publications.wait_for_pods("a")


@pytest.mark.parametrize(("status", "times"), [(504, 1), (400, 1), (500, 3)])
async def test_unknown_version_after_a_restore_causes_a_new_list(
    cluster: FakeKubernetes, status: int, times: int
) -> None:
    cluster.put(make_endpoint_slice("s1", member("a")))
    async with watch_service(cluster) as publications:
        await publications.wait_for_pods("a")
        await wait_until(lambda: cluster.num_watches)
        cluster.fail(status, times=times)
        cluster.end_watches()
        await wait_until(lambda: cluster.num_requests("list") == 2 and cluster.num_watches)
        cluster.put(make_endpoint_slice("s2", member("b")))
        await publications.wait_for_pods("a", "b")


async def test_bookmark_avoids_a_new_list_for_an_unchanged_service(
    cluster: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.put(make_endpoint_slice("s1", member("a")))
    async with watch_service(cluster) as publications:
        await wait_until(lambda: cluster.num_watches)
        for number in range(5):  # changes by other clients
            cluster.put(make_endpoint_slice(f"o{number}", service="chess"))
        cluster.send_bookmarks()
        cluster.compact()
        cluster.end_watches()
        await wait_until(lambda: cluster.num_requests("watch") == 2 and cluster.num_watches)
        cluster.put(make_endpoint_slice("s2", member("b")))
        await publications.wait_for_pods("a", "b")
    assert cluster.num_requests("list") == 1
    assert len(publications.lists) == 2
    assert caplog.text == ""


async def test_outage_and_recovery_of_the_api_server_are_logged_once(
    cluster: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ludus.services")
    cluster.put(make_endpoint_slice("one", member("a")))
    await cluster.go_down()
    num_attempts = 0

    async def sleep(pause_s: float) -> None:
        nonlocal num_attempts
        num_attempts += 1
        await asyncio.sleep(0.001)

    async with make_api_client(cluster) as api:
        source = EndpointSliceSource(api, ENVIRONMENT, dict, pauses_s=RETRY_PAUSES_S, sleep=sleep)
        lists: list[Sequence[ServerEndpoint]] = []
        watch_task = asyncio.create_task(source.watch(lists.append))
        await wait_until(lambda: num_attempts > 3)
        await cluster.come_up()
        await wait_until(lambda: lists)
        watch_task.cancel()
        await asyncio.gather(watch_task, return_exceptions=True)
    outage_record, recovery_record = [
        record for record in caplog.records if record.name.startswith("ludus.")
    ]
    assert (outage_record.levelname, recovery_record.levelname) == ("WARNING", "INFO")
    for text in (cluster.url, "ConnectionRefusedError", "networkPolicy.apiServer"):
        assert text in outage_record.getMessage()
    assert "responds again" in recovery_record.getMessage()


async def test_last_list_is_kept_during_an_outage_until_recovery(cluster: FakeKubernetes) -> None:
    cluster.put(make_endpoint_slice("s1", member("a")))
    async with watch_service(cluster) as publications:
        await publications.wait_for_pods("a")
        await wait_until(lambda: cluster.num_watches)
        await cluster.go_down()
        cluster.put(make_endpoint_slice("s1", member("b")))
        await wait_until(lambda: not cluster.num_watches)
        await asyncio.sleep(0.1)
        assert len(publications.lists) == 1
        await cluster.come_up()
        await publications.wait_for_pods("b")


@pytest.mark.parametrize("status", [401, 403, 429, 500])
async def test_last_list_is_kept_while_requests_are_refused(
    cluster: FakeKubernetes, status: int
) -> None:
    cluster.put(make_endpoint_slice("s1", member("a")))
    async with watch_service(cluster) as publications:
        await wait_until(lambda: cluster.num_watches)
        cluster.fail(status, times=10**6)
        cluster.expire_watches()
        cluster.put(make_endpoint_slice("s1", member("b")))
        num_requests = len(cluster.requests)
        await wait_until(lambda: len(cluster.requests) > num_requests + 3)
        assert set(publications.endpoints) == {"a"}
        cluster.clear_failures()
        await publications.wait_for_pods("b")


@pytest.mark.parametrize(
    "line", [b"not json\n", b'{"type":"SURPRISE","object":{}}\n', b"[1]\n", b'{"type":"ADD']
)
async def test_invalid_stream_data_restarts_the_watch(cluster: FakeKubernetes, line: bytes) -> None:
    async with watch_service(cluster) as publications:
        await wait_until(lambda: cluster.num_watches)
        cluster.send_raw(line)
        cluster.end_watches()
        await wait_until(lambda: cluster.num_requests("watch") == 2)
        cluster.put(make_endpoint_slice("s1", member("a")))
        await publications.wait_for_pods("a")


@pytest.mark.slow
async def test_a_large_slice_arrives_over_a_slow_stream(cluster: FakeKubernetes) -> None:
    pods = [f"pod-{number}" for number in range(1000)]
    async with watch_service(cluster) as publications:
        await wait_until(lambda: cluster.num_watches)
        cluster.bytes_per_write = 5_000
        cluster.put(make_endpoint_slice("s1", *map(member, pods)))
        await publications.wait_for_pods(*pods)


async def test_watches_that_end_immediately_are_retried_with_delays(
    cluster: FakeKubernetes,
) -> None:
    pauses_s: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses_s.append(pause_s)

    async with make_api_client(cluster) as api:
        source = EndpointSliceSource(api, ENVIRONMENT, dict, pauses_s=(1.0, 4.0), sleep=sleep)
        watch_task = asyncio.create_task(source.watch(lambda _: None))
        while len(pauses_s) < 5:
            cluster.end_watches()
            await asyncio.sleep(0.001)
        watch_task.cancel()
        await asyncio.gather(watch_task, return_exceptions=True)
    for pause_s, max_pause_s in zip(pauses_s, (1.0, 2.0, 4.0, 4.0, 4.0), strict=False):
        assert max_pause_s / 2 <= pause_s <= max_pause_s


async def test_watches_request_bookmarks_and_varying_timeouts(cluster: FakeKubernetes) -> None:
    async with watch_service(cluster):
        for number in range(1, 6):
            await wait_until(lambda number=number: cluster.num_requests("watch") >= number)
            await wait_until(lambda: cluster.num_watches)
            cluster.put(make_endpoint_slice("s1", member(f"pod-{number}")))
            cluster.end_watches()
    queries = [request.query for request in cluster.requests if request.verb == "watch"]
    assert {query["allowWatchBookmarks"] for query in queries} == {"true"}
    timeouts_s = {int(query["timeoutSeconds"]) for query in queries}
    assert len(timeouts_s) > 1
    assert all(240 <= timeout_s <= 300 for timeout_s in timeouts_s)


@pytest.mark.parametrize("seed", range(4))
async def test_list_matches_the_cluster_after_random_failures(
    cluster: FakeKubernetes, seed: int
) -> None:
    rng = random.Random(seed)
    expected_pods: dict[str, tuple[str, ...]] = {}

    def change_random_slice() -> None:
        name = f"s{rng.randrange(4)}"
        if name in expected_pods and rng.random() < 0.3:
            cluster.remove(*SLICES, name)
            del expected_pods[name]
            return
        expected_pods[name] = tuple(rng.sample([f"pod-{n}" for n in range(8)], rng.randrange(4)))
        cluster.put(make_endpoint_slice(name, *map(member, expected_pods[name])))

    failure_functions = [
        cluster.cut_watches,
        cluster.end_watches,
        cluster.expire_watches,
        cluster.send_bookmarks,
        lambda: cluster.send_raw(b"{\n"),
        lambda: cluster.fail(500, verb="watch"),
        lambda: cluster.fail(429, verb="list"),
    ]
    async with watch_service(cluster) as publications:
        for _ in range(60):
            for _ in range(rng.randrange(3)):
                change_random_slice()
            if rng.random() < 0.5:
                rng.choice(failure_functions)()
            await asyncio.sleep(rng.choice([0, 0, 0.002, 0.02]))
        await publications.wait_for_pods(*{pod for pods in expected_pods.values() for pod in pods})
