"""Refused open requests, which must not evict sessions or use quota."""

import httpx
import pytest

from ludus.env.encoding import ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.proto.errors import CapacityError, EnvError, InvalidCallError, RateLimitError
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.tenancy.tenants import Tenant, TenantLimits, set_current_tenant
from tests.env.polling import wait_until
from tests.gateway.gateways import NAME, count_sessions, get_sessions, run_gateway

pytestmark = pytest.mark.asyncio

OPEN_ARGS = OpenArgs(ResetArgs(seed=1))


async def open_idle_sessions(gateway: Gateway, num_sessions: int) -> None:
    """Open HTTP sessions that are never called again, so that a full gateway may evict them."""
    for _ in range(num_sessions):
        # A session that opens during a poll is counted twice until the next poll.
        await wait_until(lambda: not gateway.environments[NAME].admission.count_missing(1))
        async with httpx.AsyncClient(base_url=gateway.http_address, timeout=60) as client:
            assert (await client.post(f"/envs/{NAME}/reset", json={})).status_code == 200


@pytest.mark.slow
async def test_open_beyond_the_quota_evicts_no_session():
    async with run_gateway(server_options={"max_sessions": 3}) as (gateway, servers):
        sessions = get_sessions(gateway)
        set_current_tenant(Tenant("tight", limits=TenantLimits(max_sessions=1)))
        await sessions.open(OPEN_ARGS)
        await open_idle_sessions(gateway, 2)
        with pytest.raises(RateLimitError):
            await sessions.open(OPEN_ARGS)
        with pytest.raises(InvalidCallError):
            await sessions.open_group(OPEN_ARGS, 2)
        assert count_sessions(servers) == gateway.num_sessions == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "size"), [(OPEN_ARGS, 3), (OpenArgs(ResetArgs(seed=1), session_id="chosen"), 1)]
)
async def test_invalid_open_evicts_no_session(args, size):
    limits = {"max_group_size": 2, "queue_timeout_s": 0.0}
    async with run_gateway(server_options={"max_sessions": 2}, sessions=limits) as (
        gateway,
        servers,
    ):
        sessions = get_sessions(gateway)
        await open_idle_sessions(gateway, 2)
        with pytest.raises(InvalidCallError):
            await (sessions.open(args) if size == 1 else sessions.open_group(args, size))
        assert count_sessions(servers) == gateway.num_sessions == 2


@pytest.mark.slow
async def test_open_evicts_no_session_while_servers_are_unresponsive(monkeypatch):
    limits = {"queue_timeout_s": 0.0}
    async with run_gateway(server_options={"max_sessions": 3}, sessions=limits) as (
        gateway,
        servers,
    ):
        sessions = get_sessions(gateway)
        await open_idle_sessions(gateway, 1)
        monkeypatch.setattr(ServerLink, "accepts_sessions", False)
        with pytest.raises(CapacityError, match="accepts sessions"):
            await sessions.open(OPEN_ARGS)
        assert count_sessions(servers) == gateway.num_sessions == 1


async def test_refused_open_uses_no_quota():
    limits = {"queue_timeout_s": 0.0}
    async with run_gateway(server_options={"max_sessions": 1}, sessions=limits) as (gateway, _):
        sessions = get_sessions(gateway)
        tenant = Tenant("small", limits=TenantLimits(max_sessions=2))
        set_current_tenant(tenant)
        await sessions.open(OPEN_ARGS)
        for _ in range(3):
            with pytest.raises(EnvError):
                await sessions.open(OPEN_ARGS)
        assert gateway.quotas.count_sessions(tenant) == 1
