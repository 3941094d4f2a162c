"""`check_server` with a gateway, whose opens wait if its servers are full."""

from __future__ import annotations

import pytest

from ludus.env.check import check_server
from tests.gateway.gateways import connect_client, run_gateway


@pytest.mark.slow
async def test_opens_that_wait_for_a_free_session_break_no_rule() -> None:
    async with (
        run_gateway(server_options={"max_sessions": 4}) as (gateway, _),
        connect_client(gateway) as client,
    ):
        report = await check_server(client, seeds=range(2), num_steps=4, timeout_s=12.0)
    report.raise_if_failed()
    check = report.checks[0]
    assert (check.verdict, check.detail) == (
        "not offered",
        "a refusal, because opens wait for a free session",
    )
