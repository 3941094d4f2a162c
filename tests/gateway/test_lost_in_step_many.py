"""A step of a `step_many` that finds its session gone gives its place in the quota back."""

from __future__ import annotations

from ludus.proto.errors import SessionLostError
from tests.gateway.gateways import NAME, client_of, served


async def test_a_session_that_is_lost_among_many_steps_is_no_longer_tracked():
    async with served() as (gateway, (server,)), client_of(gateway) as client:
        lost, kept = [session for session, _ in await client.open_group(2, seed=1)]
        await server.core.close(lost.id)
        outcomes = await client.step_many([(lost, {"add": 1}), (kept, {"add": 1})])
        assert isinstance(outcomes[0], SessionLostError)
        assert outcomes[1].step_index == 1
        assert gateway.environments[NAME].num_tracked == 1
