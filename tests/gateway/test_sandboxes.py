"""A sandbox for each session: claimed when it opens, given up when it ends, by any gateway."""

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
from ludus.services.gateway.kubernetes.sandboxes import SandboxOptions, SandboxSource
from ludus.services.gateway.sessions.sessions import GatewaySessions
from tests.env.polling import eventually
from tests.gateway.cluster_objects import NAMESPACE, client_of
from tests.gateway.fake_sandboxes import CLAIMS, POOL, FakeSandboxes, sandboxes, write_kubeconfig
from tests.gateway.gateways import FAST, NAME, config_of, sessions_of

pytestmark = pytest.mark.slow

SEEDED = OpenArgs(ResetArgs(seed=1))
EAGER = SandboxOptions(unused_after_s=0.5, check_interval_s=0.05)
PATIENT = SandboxOptions(unused_after_s=60.0, check_interval_s=0.05)


@asynccontextmanager
async def serving(
    found: FakeSandboxes, options: SandboxOptions = PATIENT, **limits: object
) -> AsyncIterator[GatewaySessions]:
    """The sessions of a gateway whose servers are the cluster's sandboxes."""
    environment = SandboxEnvironment(warm_pool=POOL, namespace=NAMESPACE, grpc_port=found.port)
    running: list[GatewaySessions] = []
    source = SandboxSource(
        client_of(found.cluster),
        environment,
        lambda key: running[0].fleet.find_link_by_key(key) if running else None,
        lambda: running[0].admission.num_requested if running else 0,
        3600.0,
        options,
    )
    config = config_of("grpc://unused:1", sessions=limits, servers=FAST)
    async with Gateway(config, {NAME: source}) as gateway:
        sessions = sessions_of(gateway)
        running.append(sessions)
        sessions.admission.supply = source
        yield sessions


def are_up(links, num_links: int) -> bool:
    """Whether there are so many, and each reaches its server."""
    return len(links) == num_links and all(link.is_connected for link in links)


async def test_a_session_has_a_sandbox_of_its_own_until_it_ends() -> None:
    async with sandboxes() as found, serving(found) as sessions:
        opened = await asyncio.gather(*(sessions.open(SEEDED) for _ in range(3)))
        assert len(found.claims) == found.num_sessions == 3
        # Clients may ask for more at any time, so nothing here is ever saturated.
        assert sessions.environment_load.num_active == 3
        assert sessions.environment_load.capacity == 0
        assert sessions.description.max_sessions == sessions.load.max_sessions == 1024
        first, *others = opened
        await sessions.step(first.session_id, b'{"add": 1}', 1)
        await sessions.close(first.session_id)
        await eventually(lambda: len(found.claims) == 2)
        for one in others:
            await sessions.step(one.session_id, b'{"add": 1}', 1)
        # No session meets what another left.
        before = set(found.claims)
        await sessions.open(SEEDED)
        assert before < set(found.claims)


async def test_a_group_has_as_many_sandboxes_as_sessions() -> None:
    async with sandboxes() as found, serving(found) as sessions:
        opened = await sessions.open_group(SEEDED, 4)
        assert len({one.session_id.split("~")[1] for one in opened}) == 4
        assert len(found.claims) == 4


async def test_claims_say_whose_they_are_and_go_with_their_pool() -> None:
    async with sandboxes() as found, serving(found) as sessions:
        await sessions.open(SEEDED)
        (claim,) = found.cluster.all(*CLAIMS)
        labels = claim["metadata"]["labels"]
        assert labels["ludus.dev/warm-pool"] == POOL
        assert labels["ludus.dev/gateway"]
        (owner,) = claim["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("SandboxWarmPool", POOL)
        assert claim["spec"]["warmPoolRef"] == {"name": POOL}
        assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"


async def test_two_gateways_claim_apart_and_each_serves_the_sessions_of_both() -> None:
    async with sandboxes() as found, serving(found) as one, serving(found) as other:
        opened = await asyncio.gather(
            *(sessions.open(SEEDED) for sessions in (one, other) for _ in range(3))
        )
        assert len(found.claims) == found.num_sessions == 6
        for sessions in (one, other):
            await eventually(lambda links=sessions.fleet.links: are_up(links, 6))
        for number, sessions in enumerate((other, one) * 3):
            await sessions.step(opened[number].session_id, b'{"add": 1}', 1)


async def test_what_a_gateway_left_is_served_by_another_and_ended_when_nobody_plays_it() -> None:
    async with sandboxes() as found:
        async with serving(found) as sessions:
            played = await sessions.open(SEEDED)
            left = await sessions.open(SEEDED)
        assert len(found.claims) == 2
        server = next(one for one in found.servers.values() if one.core.load.num_sessions)
        async with serving(found, EAGER) as sessions:
            await sessions.step(played.session_id, b'{"add": 1}', 1)
            for server in found.servers.values():
                await server.core.close(left.session_id)
            await eventually(lambda: len(found.claims) == 1)
            await sessions.step(played.session_id, b'{"add": 1}', 2)


async def test_a_sandbox_that_dies_takes_its_own_session_alone() -> None:
    async with sandboxes() as found, serving(found) as sessions:
        first = await sessions.open(SEEDED)
        (claim,) = found.claims
        other = await sessions.open(SEEDED)
        await found.replace(claim)
        with pytest.raises((SessionLostError, UnavailableError)):
            await sessions.step(first.session_id, b'{"add": 1}', 1)
        await sessions.step(other.session_id, b'{"add": 1}', 1)


async def test_an_empty_pool_is_told_in_time_and_leaves_no_claim() -> None:
    async with sandboxes() as found, serving(found, EAGER, queue_timeout_s=0.3) as sessions:
        found.is_empty = True
        while not found.claims:  # until one has waited for long enough
            with pytest.raises(UnavailableError, match="warm pool 'code'") as caught:
                await sessions.open(SEEDED)
        assert caught.value.retry_after_s > 0
        assert len(found.claims) == 1
        with pytest.raises(UnavailableError):
            await sessions.open(SEEDED)
        assert len(found.claims) == 1, "the claim that waits serves the next one"
        found.is_empty = False
        await eventually(lambda: not found.claims)


@pytest.mark.parametrize(
    ("verb", "plural", "status", "said"),
    [
        ("list", "sandboxclaims", 404, "does not have agent-sandbox"),
        ("get", "sandboxwarmpools", 404, "warm pool 'code'"),
        ("create", "sandboxclaims", 403, "grant it in the gateway's Role"),
    ],
)
async def test_what_keeps_a_sandbox_from_being_claimed_is_told_in_a_sentence(
    verb: str, plural: str, status: int, said: str
) -> None:
    async with sandboxes() as found:
        found.cluster.fail(status, verb=verb, plural=plural, times=1000)
        async with serving(found, queue_timeout_s=0.3) as sessions:
            told = ""
            while said not in told:  # until one has waited for long enough
                with pytest.raises(UnavailableError) as caught:
                    await sessions.open(SEEDED)
                told = caught.value.message
            found.cluster.heal()
            assert not found.claims


async def test_a_claim_that_could_not_be_given_up_is_given_up_later() -> None:
    async with sandboxes() as found, serving(found) as sessions:
        opened = await sessions.open(SEEDED)
        found.cluster.fail(500, verb="delete", plural="sandboxclaims")
        await sessions.close(opened.session_id)
        await eventually(lambda: not found.claims)


async def test_a_gateway_that_stops_gives_up_what_it_did_not_use(monkeypatch) -> None:
    monkeypatch.setattr("ludus.services.gateway.kubernetes.sandboxes.STOP_TIMEOUT_S", 60.0)
    async with sandboxes() as found:
        async with serving(found) as sessions:
            found.is_empty = True
            opening = asyncio.create_task(sessions.open(SEEDED))
            await eventually(lambda: found.claims)
            opening.cancel()
            await eventually(lambda: not sessions.admission.supply.num_creating)
        assert not found.claims


async def test_a_gateway_is_told_of_sandboxes_by_its_configuration(tmp_path, monkeypatch) -> None:
    async with sandboxes() as found:
        kubeconfig = write_kubeconfig(tmp_path / "config", found.cluster)
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        environment = {
            "kind": "sandbox",
            "warm_pool": POOL,
            "namespace": NAMESPACE,
            "grpc_port": found.port,
        }
        async with Gateway(config_of(environments={NAME: environment})) as gateway:
            sessions = sessions_of(gateway)
            # Who asks what the environment is needs a sandbox, which the first open then takes.
            await sessions.admission.wait_described()
            opened = await sessions.open(SEEDED)
            assert len(found.claims) == 1
            await sessions.step(opened.session_id, b'{"add": 1}', 1)
