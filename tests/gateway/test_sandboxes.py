"""One sandbox per session, claimed by the open and deleted after the session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ludus.env.encoding import ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.proto.errors import SessionLostError, UnavailableError
from ludus.services.gateway.config import SandboxEnvironment
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.kubernetes.sandboxes import SandboxSource
from ludus.services.gateway.sessions.sessions import GatewaySessions
from tests.env.polling import wait_until
from tests.gateway.cluster_objects import NAMESPACE, make_api_client
from tests.gateway.fake_sandboxes import (
    CLAIMS,
    POOL,
    FakeSandboxes,
    run_sandboxes,
    write_kubeconfig,
)
from tests.gateway.gateways import FAST_POLLING, NAME, get_sessions, make_config

pytestmark = pytest.mark.slow

SEEDED = OpenArgs(ResetArgs(seed=1))
EAGER_S = 0.5
"""Short time after which an unused claim is deleted."""


@asynccontextmanager
async def serving(
    cluster: FakeSandboxes, max_unused_s: float = 60.0, **limits: object
) -> AsyncIterator[GatewaySessions]:
    """Run a gateway with the cluster's sandboxes; yield its sessions."""
    environment = SandboxEnvironment(warm_pool=POOL, namespace=NAMESPACE, grpc_port=cluster.port)
    running: list[GatewaySessions] = []
    source = SandboxSource(
        make_api_client(cluster.cluster),
        environment,
        lambda key: running[0].fleet.find_link_by_key(key) if running else None,
        lambda: running[0].admission.num_requested if running else 0,
        3600.0,
        max_unused_s=max_unused_s,
        check_interval_s=0.05,
    )
    config = make_config("grpc://unused:1", sessions=limits, servers=FAST_POLLING)
    async with Gateway(config, {NAME: source}) as gateway:
        sessions = get_sessions(gateway)
        running.append(sessions)
        sessions.admission.supply = source
        yield sessions


def are_up(links, num_links: int) -> bool:
    """Return whether the number of endpoints matches and each is connected."""
    return len(links) == num_links and all(link.is_connected for link in links)


async def test_session_has_its_own_sandbox() -> None:
    async with run_sandboxes() as cluster, serving(cluster) as sessions:
        opened = await asyncio.gather(*(sessions.open(SEEDED) for _ in range(3)))
        assert len(cluster.claims) == cluster.num_sessions == 3
        # Sandboxes are created on demand, so the fleet is never saturated.
        assert sessions.environment_load.num_active == 3
        assert sessions.environment_load.capacity == 0
        assert sessions.description.max_sessions == sessions.load.max_sessions == 1024
        first, *other_sessions = opened
        await sessions.step(first.session_id, b'{"add": 1}', 1)
        await sessions.close(first.session_id)
        await wait_until(lambda: len(cluster.claims) == 2)
        for claim in other_sessions:
            await sessions.step(claim.session_id, b'{"add": 1}', 1)
        # No session sees data of another session.
        first_claims = set(cluster.claims)
        await sessions.open(SEEDED)
        assert first_claims < set(cluster.claims)


async def test_group_has_one_sandbox_per_session() -> None:
    async with run_sandboxes() as cluster, serving(cluster) as sessions:
        opened = await sessions.open_group(SEEDED, 4)
        assert len({claim.session_id.split("~")[1] for claim in opened}) == 4
        assert len(cluster.claims) == 4


async def test_claims_say_whose_they_are_and_go_with_their_pool() -> None:
    async with run_sandboxes() as cluster, serving(cluster) as sessions:
        await sessions.open(SEEDED)
        (claim,) = cluster.cluster.all(*CLAIMS)
        labels = claim["metadata"]["labels"]
        assert labels["ludus.dev/warm-pool"] == POOL
        assert labels["ludus.dev/gateway"]
        (owner,) = claim["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("SandboxWarmPool", POOL)
        assert claim["spec"]["warmPoolRef"] == {"name": POOL}
        assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"


async def test_two_gateways_claim_separately_and_serve_each_others_sessions() -> None:
    async with run_sandboxes() as cluster, serving(cluster) as claim, serving(cluster) as other:
        opened = await asyncio.gather(
            *(sessions.open(SEEDED) for sessions in (claim, other) for _ in range(3))
        )
        assert len(cluster.claims) == cluster.num_sessions == 6
        for sessions in (claim, other):
            await wait_until(lambda links=sessions.fleet.links: are_up(links, 6))
        for number, sessions in enumerate((other, claim) * 3):
            await sessions.step(opened[number].session_id, b'{"add": 1}', 1)


async def test_claims_of_a_dead_gateway_are_served_and_then_deleted() -> None:
    async with run_sandboxes() as cluster:
        async with serving(cluster) as sessions:
            played = await sessions.open(SEEDED)
            remaining = await sessions.open(SEEDED)
        assert len(cluster.claims) == 2
        server = next(claim for claim in cluster.servers.values() if claim.core.load.num_sessions)
        async with serving(cluster, EAGER_S) as sessions:
            await sessions.step(played.session_id, b'{"add": 1}', 1)
            for server in cluster.servers.values():
                await server.core.close(remaining.session_id)
            await wait_until(lambda: len(cluster.claims) == 1)
            await sessions.step(played.session_id, b'{"add": 1}', 2)


async def test_dying_sandbox_loses_only_its_session() -> None:
    async with run_sandboxes() as cluster, serving(cluster) as sessions:
        first = await sessions.open(SEEDED)
        (claim,) = cluster.claims
        other = await sessions.open(SEEDED)
        await cluster.replace(claim)
        with pytest.raises((SessionLostError, UnavailableError)):
            await sessions.step(first.session_id, b'{"add": 1}', 1)
        await sessions.step(other.session_id, b'{"add": 1}', 1)


async def test_empty_pool_is_reported_in_time_and_leaves_no_claim() -> None:
    async with (
        run_sandboxes() as cluster,
        serving(cluster, EAGER_S, queue_timeout_s=0.3) as sessions,
    ):
        cluster.is_empty = True
        while not cluster.claims:  # wait until an open has timed out
            with pytest.raises(UnavailableError, match="warm pool 'code'") as caught:
                await sessions.open(SEEDED)
        assert caught.value.retry_after_s > 0
        assert len(cluster.claims) == 1
        with pytest.raises(UnavailableError):
            await sessions.open(SEEDED)
        assert len(cluster.claims) == 1, "the claim that waits serves the next one"
        cluster.is_empty = False
        await wait_until(lambda: not cluster.claims)


@pytest.mark.parametrize(
    ("verb", "plural", "status", "message"),
    [
        ("list", "sandboxclaims", 404, "does not have agent-sandbox"),
        ("get", "sandboxwarmpools", 404, "warm pool 'code'"),
        ("create", "sandboxclaims", 403, "grant it in the gateway's Role"),
    ],
)
async def test_failed_claim_is_explained_to_the_client(
    verb: str, plural: str, status: int, message: str
) -> None:
    async with run_sandboxes() as cluster:
        cluster.cluster.fail(status, verb=verb, plural=plural, times=1000)
        async with serving(cluster, queue_timeout_s=0.3) as sessions:
            messages = ""
            while message not in messages:  # wait until an open has timed out
                with pytest.raises(UnavailableError) as caught:
                    await sessions.open(SEEDED)
                messages = caught.value.message
            cluster.cluster.heal()
            assert not cluster.claims


async def test_failed_delete_of_a_claim_is_retried() -> None:
    async with run_sandboxes() as cluster, serving(cluster) as sessions:
        opened = await sessions.open(SEEDED)
        cluster.cluster.fail(500, verb="delete", plural="sandboxclaims")
        await sessions.close(opened.session_id)
        await wait_until(lambda: not cluster.claims)


async def test_stopping_gateway_deletes_unused_claims(monkeypatch) -> None:
    monkeypatch.setattr("ludus.services.gateway.kubernetes.sandboxes.STOP_TIMEOUT_S", 60.0)
    async with run_sandboxes() as cluster:
        async with serving(cluster) as sessions:
            cluster.is_empty = True
            opening = asyncio.create_task(sessions.open(SEEDED))
            await wait_until(lambda: cluster.claims)
            opening.cancel()
            await wait_until(lambda: not sessions.admission.supply.new_names)
        assert not cluster.claims


async def test_configuration_enables_sandboxes(tmp_path, monkeypatch) -> None:
    async with run_sandboxes() as cluster:
        kubeconfig = write_kubeconfig(tmp_path / "config", cluster.cluster)
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        environment = {
            "kind": "sandbox",
            "warm_pool": POOL,
            "namespace": NAMESPACE,
            "grpc_port": cluster.port,
        }
        async with Gateway(make_config(environments={NAME: environment})) as gateway:
            sessions = get_sessions(gateway)
            # A description needs a sandbox, which the first open then uses.
            await sessions.admission.wait_until_described()
            opened = await sessions.open(SEEDED)
            assert len(cluster.claims) == 1
            await sessions.step(opened.session_id, b'{"add": 1}', 1)
