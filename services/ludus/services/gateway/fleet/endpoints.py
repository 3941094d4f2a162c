"""The environment servers behind a gateway, and where the gateway learns of them.

    EndpointSource --whole list, on every change--> Fleet (places and routes sessions)

Three sources: fixed addresses, processes on this machine, and a cluster's EndpointSlices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One environment server, as its source sees it."""

    key: str
    """Its name in the source, stable while it lives: an address, or a pod's uid."""
    grpc_address: str
    """For example grpc://10.0.0.7:18000."""
    http_address: str
    """For example http://10.0.0.7:8000; empty where the source does not know it."""
    is_ready: bool = True
    """It takes new sessions."""
    is_terminating: bool = False
    """It keeps the sessions it has and takes no new ones."""
    server_id: str = ""
    """The name in session ids where the source knows it; else the server is asked."""
    pod_name: str = ""
    """Empty outside a cluster."""
    max_opens: int | None = None
    """So many sessions are ever opened here through this gateway; None sets no limit."""


Publish = Callable[[Sequence[Endpoint]], None]


class EndpointSource(Protocol):
    """Where a gateway learns of the servers of one environment."""

    async def watch(self, publish: Publish) -> None:
        """Publish the whole list when it is first known and on each change, for ever."""

    async def close(self) -> None:
        """Stop what the source itself started."""
