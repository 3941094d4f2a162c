"""Of several gateways one leads, and never two, whatever their clocks and the API server do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludus.proto.errors import ConfigError
from ludus.services.gateway.kubernetes.leadership import Leadership, LeaseOptions
from ludus.services.kubernetes.access import ApiAccess
from ludus.services.kubernetes.api import KubernetesApi
from tests.env.polling import eventually
from tests.gateway.clock import Clock
from tests.gateway.cluster_objects import NAMESPACE, client_of
from tests.gateway.fake_kubernetes import FakeKubernetes

LEASE = ("coordination.k8s.io/v1", "leases", NAMESPACE, "gateway")


@pytest.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as cluster:
        yield cluster


@pytest.fixture
async def api(cluster: FakeKubernetes) -> AsyncIterator[KubernetesApi]:
    async with client_of(cluster) as api:
        yield api


def contender(api: KubernetesApi, name: str, clock: Clock, offset_s: float = 0.0) -> Leadership:
    """A contender for the one Lease, whose clock is off by some seconds."""
    patient = LeaseOptions(renew_s=9.9)  # an attempt may take so long
    return Leadership(
        api, NAMESPACE, "gateway", name, options=patient, clock=lambda: clock() + offset_s
    )


async def test_the_first_of_three_leads_and_the_others_follow_when_it_dies(
    api: KubernetesApi,
) -> None:
    clock = Clock()
    first, second, third = (
        contender(api, name, clock, 1e6 * len(name)) for name in ("a", "bb", "")
    )
    assert await first.compete()
    for _ in range(10):  # 30 s of renewals
        clock.now_s += 3
        assert await first.compete()
        assert not await second.compete()
        assert not await third.compete()
    clock.now_s += 14.9
    assert not first.is_leader
    assert not await second.compete()
    clock.now_s += 0.2
    assert await second.compete()
    assert not await third.compete()
    assert not await first.compete()


async def test_a_contender_that_just_came_waits_for_a_dead_leaders_whole_lease(
    api: KubernetesApi,
) -> None:
    clock = Clock()
    assert await contender(api, "dead", clock).compete()
    clock.now_s += 1000
    late = contender(api, "late", clock)
    assert not await late.compete()
    clock.now_s += 14.9
    assert not await late.compete()
    clock.now_s += 0.2
    assert await late.compete()


async def test_times_written_by_other_clocks_decide_nothing(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    spec = {"holderIdentity": "other", "leaseDurationSeconds": 15}
    for renew_time in ("1999-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"):
        found = {
            "apiVersion": LEASE[0],
            "kind": "Lease",
            "metadata": {"name": "gateway", "namespace": NAMESPACE},
            "spec": {**spec, "renewTime": renew_time},
        }
        cluster.put(found)
        challenger = contender(api, "challenger", clock)
        assert not await challenger.compete()
        clock.now_s += 15.1
        assert await challenger.compete()


async def test_a_released_lease_is_taken_at_the_next_look(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    first, second = contender(api, "first", clock), contender(api, "second", clock)
    assert await first.compete()
    assert not await second.compete()
    await second.release()
    assert first.is_leader
    await first.release()
    assert not first.is_leader
    assert await second.compete()
    assert cluster.get(*LEASE)["spec"]["holderIdentity"] == second.identity


async def test_of_many_that_rush_for_a_lease_one_gets_it(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    cluster.delay_s = 0.005
    for _ in range(5):
        contenders = [contender(api, f"c{number}", clock) for number in range(8)]
        for wait_s in (0.0, 16.0):
            clock.now_s += wait_s
            won = await asyncio.gather(*(one.compete() for one in contenders))
            if any(won):
                break
        assert won.count(True) == 1
        assert sum(one.is_leader for one in contenders) == 1
    assert cluster.get(*LEASE)["spec"]["leaseTransitions"] == 4


async def test_a_leader_without_the_api_server_stops_before_another_may_begin(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    first, second = contender(api, "first", clock), contender(api, "second", clock)
    assert await first.compete()
    assert not await second.compete()
    await cluster.go_down()
    clock.now_s += 5
    assert await first.compete(), "one failed renewal is no reason to stop"
    clock.now_s += 5
    assert not await first.compete()
    assert not await second.compete()
    await cluster.come_up()
    assert await first.compete(), "its lease was not taken meanwhile"
    assert not await second.compete()


async def test_a_renewal_whose_answer_is_lost_extends_nothing_but_is_repaired(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    leader = contender(api, "leader", clock)
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


async def test_a_lease_that_somebody_rewrites_is_given_up(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    leader = contender(api, "leader", clock)
    assert await leader.compete()
    found = cluster.get(*LEASE)
    found["spec"]["holderIdentity"] = "an administrator"
    cluster.put(found)
    assert not await leader.compete()


async def test_two_contenders_of_one_name_do_not_both_lead(api: KubernetesApi) -> None:
    clock = Clock()
    twins = [contender(api, "gateway-0", clock) for _ in range(2)]
    assert [await twin.compete() for twin in twins] == [True, False]


async def test_the_lease_is_written_as_kubernetes_wants_it(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock = Clock()
    first, second = contender(api, "first", clock), contender(api, "second", clock)
    assert await first.compete()
    acquired = cluster.get(*LEASE)["spec"]["acquireTime"]
    clock.now_s += 3
    assert await first.compete()
    spec = cluster.get(*LEASE)["spec"]
    assert spec["acquireTime"] == acquired < spec["renewTime"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", spec["renewTime"])
    assert (spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (15, 0)
    await first.release()
    assert await second.compete()
    assert cluster.get(*LEASE)["spec"]["leaseTransitions"] == 1


async def test_a_lease_that_somebody_made_keeps_what_it_is_known_by(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    known_by = {"labels": {"app": "ludus"}, "annotations": {"made-by": "helm"}}
    version, _, namespace, name = LEASE
    metadata = {"name": name, "namespace": namespace, **known_by}
    cluster.put({"apiVersion": version, "kind": "Lease", "metadata": metadata})
    clock = Clock()
    leader = contender(api, "a", clock)
    for _ in range(2):
        assert await leader.compete()
        clock.now_s += 3
    await leader.release()
    found = cluster.get(*LEASE)["metadata"]
    assert {field: found[field] for field in known_by} == known_by


@pytest.mark.slow
async def test_gateways_in_a_row_lead_on_their_own(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock, quick = Clock(), LeaseOptions(renew_s=0.2)

    def start(name: str) -> Leadership:
        return Leadership(api, NAMESPACE, "gateway", name, options=quick, clock=clock)

    async with start("b") as heir:
        await eventually(lambda: heir.is_leader)
        async with start("a") as late:
            await eventually(lambda: cluster.num_requests("get") > 6)
            assert heir.is_leader
            assert not late.is_leader
            await heir.__aexit__()
            assert not heir.is_leader
            clock.now_s += 15.1  # should the release not have arrived in its time
            await eventually(lambda: late.is_leader)
            await cluster.go_down()
            clock.now_s += 10.1
            assert not late.is_leader
            await cluster.come_up()
            await eventually(lambda: late.is_leader)
    assert not late.is_leader


async def test_a_dead_leader_is_followed_when_its_lease_is_over(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    clock, quick = Clock(), LeaseOptions(renew_s=0.1)
    dead = contender(api, "dead", clock)
    assert await dead.compete()
    async with Leadership(api, NAMESPACE, "gateway", "heir", options=quick, clock=clock) as heir:
        for passed_s in (14.9, 0.2):
            num_looks = cluster.num_requests("get")
            await eventually(lambda before=num_looks: cluster.num_requests("get") > before + 2)
            assert not heir.is_leader
            clock.now_s += passed_s
        await eventually(lambda: heir.is_leader)
    assert not dead.is_leader


@pytest.mark.slow
async def test_an_api_server_that_does_not_answer_does_not_hold_a_shutdown_up(
    cluster: FakeKubernetes, api: KubernetesApi
) -> None:
    quick = LeaseOptions(lease_duration_s=1, renew_s=0.1)
    async with Leadership(api, NAMESPACE, "gateway", "a", options=quick) as leader:
        await eventually(lambda: leader.is_leader)
        cluster.delay_s = 60.0
        leaving_s = time.monotonic()
    assert time.monotonic() - leaving_s < 30.0


async def test_a_gateway_that_may_not_use_leases_does_not_lead_and_says_so_once(
    cluster: FakeKubernetes, api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.fail(403, times=10**6)
    hopeless = contender(api, "a", Clock())
    for _ in range(4):
        assert not await hopeless.compete()
    assert caplog.text.count("grant it in the gateway's Role") == 1


async def test_a_gateway_without_credentials_continues_asking() -> None:
    asked = []

    def load() -> ApiAccess:
        asked.append(1)
        raise ConfigError("expected a service account, got none; mount one")

    quick = LeaseOptions(lease_duration_s=1, renew_s=0.02)
    async with Leadership(KubernetesApi(load), NAMESPACE, "gateway", "a", options=quick):
        await eventually(lambda: len(asked) >= 3)


def test_a_lease_that_cannot_be_renewed_in_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="renew more often"):
        LeaseOptions(lease_duration_s=15, renew_s=10.0)


Moves = st.lists(
    st.one_of(
        st.tuples(st.just("compete"), st.sets(st.integers(0, 2), min_size=1)),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 5.0, 9.9, 14.0, 16.0])),
        st.tuples(st.just("lose the answer of"), st.sampled_from(["get", "create", "update"])),
        st.tuples(st.just("refuse"), st.sampled_from(["get", "create", "update"])),
        st.tuples(st.just("release"), st.integers(0, 2)),
    ),
    max_size=30,
)


@pytest.mark.slow
@given(moves=Moves)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_two_never_lead_whatever_happens(moves: list[tuple[str, object]]) -> None:
    asyncio.run(_play(moves))


async def _play(moves: list[tuple[str, object]]) -> None:
    async with FakeKubernetes() as cluster, client_of(cluster) as api:
        clock = Clock()
        contenders = [contender(api, f"c{n}", clock, offset_s=1000.0 * n) for n in range(3)]
        for move, what in moves:
            if move == "compete":
                await asyncio.gather(*(contenders[number].compete() for number in what))
            elif move == "wait":
                clock.now_s += what
            elif move == "release":
                await contenders[what].release()
            else:
                cluster.fail(0 if move.startswith("lose") else 500, verb=what)
            assert sum(one.is_leader for one in contenders) <= 1
        cluster.heal()
        clock.now_s += 16.0
        for one in contenders:
            await one.compete()
        clock.now_s += 15.0
        won = [await one.compete() for one in contenders]
        assert won.count(True) == 1, "somebody leads once the trouble is over"
