"""Sandboxes from a Kubernetes warm pool: one claim per session, deleted with the session."""

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

TOKEN_VARIABLE = "LUDUS_TEST_FLEET_TOKEN"
OPEN_ARGS = OpenArgs(ResetArgs(seed=1))
MAX_UNUSED_S = 0.5
"""Time after which an unused claim is deleted, short for the tests."""


@asynccontextmanager
async def run_gateway(
    cluster: FakeSandboxes, max_unused_s: float = 60.0, **limits: object
) -> AsyncIterator[GatewaySessions]:
    """Run a gateway with the cluster's sandboxes, and yield its sessions."""
    environment = SandboxEnvironment(warm_pool=POOL, namespace=NAMESPACE, grpc_port=cluster.port)
    gateway_sessions: list[GatewaySessions] = []
    source = SandboxSource(
        make_api_client(cluster.cluster),
        environment,
        lambda key: gateway_sessions[0].fleet.find_link_by_key(key) if gateway_sessions else None,
        lambda: gateway_sessions[0].admission.num_requested if gateway_sessions else 0,
        3600.0,
        max_unused_s=max_unused_s,
        check_interval_s=0.05,
    )
    servers = {**FAST_POLLING, "token_env": TOKEN_VARIABLE, "derive_tokens": True}
    config = make_config("grpc://unused:1", sessions=limits, servers=servers)
    async with Gateway(config, {NAME: source}) as gateway:
        sessions = get_sessions(gateway)
        gateway_sessions.append(sessions)
        sessions.admission.supply = source
        yield sessions


def are_connected(links, num_links: int) -> bool:
    """Return whether there are `num_links` links and all of them are connected."""
    return len(links) == num_links and all(link.is_connected for link in links)


async def test_each_sandbox_gets_the_token_that_is_derived_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_sandboxes() as cluster:
        cluster.fleet_token = "token-of-the-whole-fleet"
        monkeypatch.setenv(TOKEN_VARIABLE, cluster.fleet_token)
        async with run_gateway(cluster, queue_timeout_s=10.0) as sessions:
            opened_sessions = [await sessions.open(OPEN_ARGS) for _ in range(2)]
            for session in opened_sessions:
                await sessions.step(session.session_id, b'{"add": 1}', 1)


async def test_sessions_have_separate_sandboxes() -> None:
    async with run_sandboxes() as cluster, run_gateway(cluster) as sessions:
        opened_sessions = await asyncio.gather(*(sessions.open(OPEN_ARGS) for _ in range(3)))
        assert len(cluster.claims) == cluster.num_sessions == 3
        # Sandboxes are created on demand, so the fleet is never saturated.
        assert sessions.environment_load.num_active == 3
        assert sessions.environment_load.capacity == 0
        assert sessions.description.max_sessions == sessions.load.max_sessions == 1024
        first_session, *other_sessions = opened_sessions
        await sessions.step(first_session.session_id, b'{"add": 1}', 1)
        await sessions.close(first_session.session_id)
        await wait_until(lambda: len(cluster.claims) == 2)
        for session in other_sessions:
            await sessions.step(session.session_id, b'{"add": 1}', 1)
        # A new session gets a new sandbox, so it cannot read data of another session.
        first_claims = set(cluster.claims)
        await sessions.open(OPEN_ARGS)
        assert first_claims < set(cluster.claims)


async def test_group_has_one_sandbox_per_session() -> None:
    async with run_sandboxes() as cluster, run_gateway(cluster) as sessions:
        opened_sessions = await sessions.open_group(OPEN_ARGS, 4)
        assert len({session.session_id.split("~")[1] for session in opened_sessions}) == 4
        assert len(cluster.claims) == 4


async def test_claim_has_gateway_and_pool_labels_and_the_pool_as_owner() -> None:
    async with run_sandboxes() as cluster, run_gateway(cluster) as sessions:
        await sessions.open(OPEN_ARGS)
        (claim,) = cluster.cluster.list_objects(*CLAIMS)
        labels = claim["metadata"]["labels"]
        assert labels["ludus.dev/warm-pool"] == POOL
        assert labels["ludus.dev/gateway"]
        (owner,) = claim["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("SandboxWarmPool", POOL)
        assert claim["spec"]["warmPoolRef"] == {"name": POOL}
        assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"


async def test_gateways_create_separate_claims_and_serve_sessions_of_other_gateways() -> None:
    async with (
        run_sandboxes() as cluster,
        run_gateway(cluster) as first_sessions,
        run_gateway(cluster) as second_sessions,
    ):
        opened_sessions = await asyncio.gather(
            *(
                sessions.open(OPEN_ARGS)
                for sessions in (first_sessions, second_sessions)
                for _ in range(3)
            )
        )
        assert len(cluster.claims) == cluster.num_sessions == 6
        for sessions in (first_sessions, second_sessions):
            await wait_until(lambda links=sessions.fleet.links: are_connected(links, 6))
        for session_index, sessions in enumerate((second_sessions, first_sessions) * 3):
            await sessions.step(opened_sessions[session_index].session_id, b'{"add": 1}', 1)


async def test_sessions_of_a_dead_gateway_continue_and_unused_claims_are_deleted() -> None:
    async with run_sandboxes() as cluster:
        async with run_gateway(cluster) as sessions:
            played_session = await sessions.open(OPEN_ARGS)
            unused_session = await sessions.open(OPEN_ARGS)
        assert len(cluster.claims) == 2
        server = next(
            server for server in cluster.servers.values() if server.core.load.num_sessions
        )
        async with run_gateway(cluster, MAX_UNUSED_S) as sessions:
            await sessions.step(played_session.session_id, b'{"add": 1}', 1)
            for server in cluster.servers.values():
                await server.core.close(unused_session.session_id)
            await wait_until(lambda: len(cluster.claims) == 1)
            await sessions.step(played_session.session_id, b'{"add": 1}', 2)


async def test_dead_sandbox_loses_only_one_session() -> None:
    async with run_sandboxes() as cluster, run_gateway(cluster) as sessions:
        first_session = await sessions.open(OPEN_ARGS)
        (claim,) = cluster.claims
        other_session = await sessions.open(OPEN_ARGS)
        await cluster.replace(claim)
        with pytest.raises((SessionLostError, UnavailableError)):
            await sessions.step(first_session.session_id, b'{"add": 1}', 1)
        await sessions.step(other_session.session_id, b'{"add": 1}', 1)


async def test_open_with_an_empty_pool_times_out_and_leaves_no_claim() -> None:
    async with (
        run_sandboxes() as cluster,
        run_gateway(cluster, MAX_UNUSED_S, queue_timeout_s=0.3) as sessions,
    ):
        cluster.is_empty = True
        while not cluster.claims:  # until an open request has created a claim
            with pytest.raises(UnavailableError, match="warm pool 'code'") as error:
                await sessions.open(OPEN_ARGS)
        assert error.value.retry_after_s > 0
        assert len(cluster.claims) == 1
        with pytest.raises(UnavailableError):
            await sessions.open(OPEN_ARGS)
        assert len(cluster.claims) == 1, "second open request did not reuse the pending claim"
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
async def test_client_receives_the_reason_for_a_failed_claim(
    verb: str, plural: str, status: int, message: str
) -> None:
    async with run_sandboxes() as cluster:
        cluster.cluster.fail(status, verb=verb, plural=plural, times=1000)
        async with run_gateway(cluster, queue_timeout_s=0.3) as sessions:
            error_message = ""
            while message not in error_message:  # until the error contains the reason
                with pytest.raises(UnavailableError) as error:
                    await sessions.open(OPEN_ARGS)
                error_message = error.value.message
            cluster.cluster.clear_failures()
            assert not cluster.claims


async def test_failed_delete_of_a_claim_is_retried() -> None:
    async with run_sandboxes() as cluster, run_gateway(cluster) as sessions:
        session = await sessions.open(OPEN_ARGS)
        cluster.cluster.fail(500, verb="delete", plural="sandboxclaims")
        await sessions.close(session.session_id)
        await wait_until(lambda: not cluster.claims)


async def test_stopping_gateway_deletes_unused_claims(monkeypatch) -> None:
    monkeypatch.setattr("ludus.services.gateway.kubernetes.sandboxes.STOP_TIMEOUT_S", 60.0)
    async with run_sandboxes() as cluster:
        async with run_gateway(cluster) as sessions:
            cluster.is_empty = True
            open_task = asyncio.create_task(sessions.open(OPEN_ARGS))
            await wait_until(lambda: cluster.claims)
            open_task.cancel()
            await wait_until(lambda: not sessions.admission.supply.new_names)
        assert not cluster.claims


async def test_gateway_configuration_can_use_sandboxes(tmp_path, monkeypatch) -> None:
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
            # The gateway claims a sandbox for the description, and the first session reuses it.
            await sessions.admission.wait_until_described()
            session = await sessions.open(OPEN_ARGS)
            assert len(cluster.claims) == 1
            await sessions.step(session.session_id, b'{"add": 1}', 1)
