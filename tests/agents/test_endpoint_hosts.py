"""The endpoint of agents on loopback refuses web pages whose host name resolves to this machine."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest

from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 403), ("localhost", 200), ("worker.internal:80", 200)]
)
async def test_only_names_of_loopback_and_of_the_worker_are_accepted(
    host: str, status: int
) -> None:
    endpoint = AgentEndpoint(advertised_host="worker.internal")
    await endpoint.start()
    try:
        with endpoint.open_episode(cast(Any, None)) as episode:
            port = episode.access.base_url.rpartition(":")[2]
            headers = {"host": host, "authorization": f"Bearer {episode.access.api_key}"}
            async with httpx.AsyncClient(timeout=60) as client:
                url = f"http://127.0.0.1:{port}/models"
                assert (await client.get(url, headers=headers)).status_code == status
    finally:
        await endpoint.stop()
