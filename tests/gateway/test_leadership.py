"""Leader election between gateways, with wrong clocks and API server failures."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludus.proto.errors import ConfigError
from ludus.services.gateway.kubernetes.leadership import Leadership
from ludus.services.kubernetes.access import ApiAccess
from ludus.services.kubernetes.api import KubernetesApi
from tests.env.polling import wait_until
from tests.gateway.clock import Clock
from tests.gateway.cluster_objects import NAMESPACE, make_api_client
from tests.gateway.fake_kubernetes import FakeKubernetes

LEASE = ("coordination.k8s.io/v1", "leases", NAMESPACE, "gateway")


@pytest.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as cluster:
        yield cluster


@pytest.fixture
async def api(cluster: FakeKubernetes) -> AsyncIterator[KubernetesApi]:
    async with make_api_client(cluster) as api:
        yield api


def make_contender(
    api: KubernetesApi, name: str, clock: Clock, offset_s: float = 0.0
) -> Leadership:
    """Build a contender for the Lease whose clock is `offset_s` fast."""
    interval_s = 9.9  # also limits the duration of an attempt
    return Leadership(
        api,
        NAMESPACE,
        "gateway",
        name,
        renew_interval_s=interval_s,
        clock=lambda: clock() + offset_s,
    )


async def test_first_contender_leads_and_another_takes_over_after_expiry(
    api: KubernetesApi,
) -> None:
    clock = Clock()
    first_contender, second_contender, third_contender = (
        make_contender(api, name, clock, 1e6 * len(name)) for name in ("a", "bb", "")
    )
    assert await first_contender.compete()
    for _ in range(10):  # 30 s of renewals
        clock.now_s += 3
        assert await first_contender.compete()
        assert not await second_contender.compete()
        assert not await third_contender.compete()
    clock.now_s += 14.9
    assert not first_contender.is_leader
    assert not await second_contender.compete()
    clock.now_s += 0.2
    assert await second_contender.compete()
    assert not await third_contender.compete()
    assert not await first_contender.compete()


async def test_new_contender_waits_until_the_lease_of_a_dead_leader_expires(
    api: KubernetesApi,
) -> None:
    clock = Clock()
    assert await make_contender(api, "dead", clock).compete()
    clock.now_s += 1000
    late_contender = make_contender(api, "late", clock)
    assert not await late_contender.compete()
    clock.now_s += 14.9
    assert not await late_contender.compete()
    clock.now_s += 0.2
    assert await late_contender.compete()


async def test_lease_expiry_ignores_clocks_of_other_contenders(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    spec = {"holderIdentity": "other", "leaseDurationSeconds": 15}
    for renew_time in ("1999-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"):
        lease = {
            "apiVersion": LEASE[0],
            "kind": "Lease",
            "metadata": {"name": "gateway", "namespace": NAMESPACE},
            "spec": {**spec, "renewTime": renew_time},
        }
        cluster.put(lease)
        challenger = make_contender(api, "challenger", clock)
        assert not await challenger.compete()
        clock.now_s += 15.1
        assert await challenger.compete()


async def test_released_lease_is_acquired_at_the_next_attempt(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    leader, rival = make_contender(api, "first", clock), make_contender(api, "second", clock)
    assert await leader.compete()
    assert not await rival.compete()
    await rival.release()
    assert leader.is_leader
    await leader.release()
    assert not leader.is_leader
    assert await rival.compete()
    assert cluster.get(*LEASE)["spec"]["holderIdentity"] == rival.identity


@pytest.mark.slow
async def test_only_one_of_many_contenders_gets_the_lease(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    cluster.delay_s = 0.005
    for _ in range(5):
        contenders = [make_contender(api, f"c{number}", clock) for number in range(8)]
        for wait_s in (0.0, 16.0):
            clock.now_s += wait_s
            results = await asyncio.gather(*(contender.compete() for contender in contenders))
            if any(results):
                break
        assert results.count(True) == 1
        assert sum(contender.is_leader for contender in contenders) == 1
    assert cluster.get(*LEASE)["spec"]["leaseTransitions"] == 4


async def test_leader_without_api_server_stops_before_another_leads(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    leader, rival = make_contender(api, "first", clock), make_contender(api, "second", clock)
    assert await leader.compete()
    assert not await rival.compete()
    await cluster.go_down()
    clock.now_s += 5
    assert await leader.compete(), "leader stopped after one failed renewal"
    clock.now_s += 5
    assert not await leader.compete()
    assert not await rival.compete()
    await cluster.come_up()
    assert await leader.compete(), "leader did not renew its lease after the outage"
    assert not await rival.compete()


async def test_renewal_without_a_response_does_not_extend_the_lease(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    leader = make_contender(api, "leader", clock)
    cluster.fail(0, verb="create")
    assert not await leader.compete()
    assert cluster.get(*LEASE)["spec"]["holderIdentity"] == leader.identity
    assert await leader.compete()
    clock.now_s += 9
    cluster.fail(0, verb="update")
    assert await leader.compete()
    clock.now_s += 2
    assert not leader.is_leader
    assert await leader.compete()


async def test_leader_stops_when_its_lease_is_rewritten(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    leader = make_contender(api, "leader", clock)
    assert await leader.compete()
    lease = cluster.get(*LEASE)
    lease["spec"]["holderIdentity"] = "an administrator"
    cluster.put(lease)
    assert not await leader.compete()


async def test_contenders_with_the_same_name_do_not_both_lead(api: KubernetesApi) -> None:
    clock = Clock()
    contenders = [make_contender(api, "gateway-0", clock) for _ in range(2)]
    assert [await contender.compete() for contender in contenders] == [True, False]


async def test_lease_has_the_kubernetes_format(cluster: FakeKubernetes, api: KubernetesApi) -> None:
    clock = Clock()
    leader, rival = make_contender(api, "first", clock), make_contender(api, "second", clock)
    assert await leader.compete()
    acquire_time = cluster.get(*LEASE)["spec"]["acquireTime"]
    clock.now_s += 3
    assert await leader.compete()
    spec = cluster.get(*LEASE)["spec"]
    assert spec["acquireTime"] == acquire_time < spec["renewTime"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", spec["renewTime"])
    assert (spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (15, 0)
    await leader.release()
    assert await rival.compete()
    assert cluster.get(*LEASE)["spec"]["leaseTransitions"] == 1


async def test_existing_lease_keeps_its_labels(cluster: FakeKubernetes, api: KubernetesApi) -> None:
    custom_metadata = {"labels": {"app": "ludus"}, "annotations": {"made-by": "helm"}}
    version, _, namespace, name = LEASE
    metadata = {"name": name, "namespace": namespace, **custom_metadata}
    cluster.put({"apiVersion": version, "kind": "Lease", "metadata": metadata})
    clock = Clock()
    leader = make_contender(api, "a", clock)
    for _ in range(2):
        assert await leader.compete()
        clock.now_s += 3
    await leader.release()
    lease_metadata = cluster.get(*LEASE)["metadata"]
    assert {field: lease_metadata[field] for field in custom_metadata} == custom_metadata


@pytest.mark.slow
async def test_successive_gateways_can_lead(cluster: FakeKubernetes, api: KubernetesApi) -> None:
    clock = Clock()

    def make_leadership(name: str) -> Leadership:
        return Leadership(api, NAMESPACE, "gateway", name, renew_interval_s=0.2, clock=clock)

    async with make_leadership("b") as early_gateway:
        await wait_until(lambda: early_gateway.is_leader)
        async with make_leadership("a") as late_gateway:
            await wait_until(lambda: cluster.num_requests("get") > 6)
            assert early_gateway.is_leader
            assert not late_gateway.is_leader
            await early_gateway.__aexit__()
            assert not early_gateway.is_leader
            clock.now_s += 15.1  # in case the release did not reach the server
            await wait_until(lambda: late_gateway.is_leader)
            await cluster.go_down()
            clock.now_s += 10.1
            assert not late_gateway.is_leader
            await cluster.come_up()
            await wait_until(lambda: late_gateway.is_leader)
    assert not late_gateway.is_leader


@pytest.mark.slow
async def test_dead_leader_is_replaced_when_the_lease_expires(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    dead_leader = make_contender(api, "dead", clock)
    assert await dead_leader.compete()
    async with Leadership(
        api, NAMESPACE, "gateway", "successor", renew_interval_s=0.1, clock=clock
    ) as successor:
        for elapsed_s in (14.9, 0.2):
            num_reads = cluster.num_requests("get")
            await wait_until(
                lambda old_num_reads=num_reads: cluster.num_requests("get") > old_num_reads + 2
            )
            assert not successor.is_leader
            clock.now_s += elapsed_s
        await wait_until(lambda: successor.is_leader)
    assert not dead_leader.is_leader


@pytest.mark.slow
async def test_unresponsive_api_server_does_not_delay_the_shutdown(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    async with Leadership(api, NAMESPACE, "gateway", "a", renew_interval_s=0.1) as leader:
        await wait_until(lambda: leader.is_leader)
        cluster.delay_s = 60.0
        exit_start_s = time.monotonic()
    assert time.monotonic() - exit_start_s < 30.0


async def test_gateway_without_lease_permission_does_not_lead_and_logs_one_error(
    cluster: FakeKubernetes, api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.fail(403, times=10**6)
    contender = make_contender(api, "a", Clock())
    for _ in range(4):
        assert not await contender.compete()
    assert caplog.text.count("grant it in the gateway's Role") == 1


async def test_gateway_without_credentials_keeps_retrying() -> None:
    load_calls = []

    def load_access() -> ApiAccess:
        load_calls.append(1)
        raise ConfigError("expected a service account, got none; mount one")

    async with Leadership(
        KubernetesApi(load_access), NAMESPACE, "gateway", "a", renew_interval_s=0.02
    ):
        await wait_until(lambda: len(load_calls) >= 3)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("compete"), st.sets(st.integers(0, 2), min_size=1)),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 5.0, 9.9, 14.0, 16.0])),
        st.tuples(st.just("lose the response to"), st.sampled_from(["get", "create", "update"])),
        st.tuples(st.just("refuse"), st.sampled_from(["get", "create", "update"])),
        st.tuples(st.just("release"), st.integers(0, 2)),
    ),
    max_size=30,
)


@pytest.mark.slow
@given(events=EVENTS)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_events_never_cause_two_leaders(events: list[tuple[str, object]]) -> None:
    asyncio.run(_run_events(events))


async def _run_events(events: list[tuple[str, object]]) -> None:
    async with FakeKubernetes() as cluster, make_api_client(cluster) as api:
        clock = Clock()
        contenders = [make_contender(api, f"c{n}", clock, offset_s=1000.0 * n) for n in range(3)]
        for event, argument in events:
            if event == "compete":
                await asyncio.gather(*(contenders[number].compete() for number in argument))
            elif event == "wait":
                clock.now_s += argument
            elif event == "release":
                await contenders[argument].release()
            else:
                cluster.fail(0 if event.startswith("lose") else 500, verb=argument)
            assert sum(contender.is_leader for contender in contenders) <= 1
        cluster.clear_failures()
        clock.now_s += 16.0
        for contender in contenders:
            await contender.compete()
        clock.now_s += 15.0
        results = [await contender.compete() for contender in contenders]
        assert results.count(True) == 1, f"no single leader after the failures: {results}"
