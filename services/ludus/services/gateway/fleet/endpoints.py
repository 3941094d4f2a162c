"""Environment servers behind a gateway, and the sources that list them.

    EndpointSource --whole list, on every change--> Fleet (places sessions and routes calls)

Sources are fixed addresses, processes on this machine, the EndpointSlices of a cluster, and
sandboxes claimed from a warm pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """An environment server as its source lists it."""

    key: str
    """Unique name in the source: an address, or a pod's uid. It never changes for a server."""
    grpc_address: str
    """gRPC address, for example grpc://10.0.0.7:18000."""
    http_address: str
    """HTTP address, for example http://10.0.0.7:8000; empty if unknown."""
    is_ready: bool = True
    """True if the server accepts new sessions."""
    is_terminating: bool = False
    """True if the server keeps its sessions but accepts no new ones."""
    server_id: str = ""
    """Server id in session ids; empty if only the server can report it."""
    pod_name: str = ""
    """Name of the server's pod; empty outside a cluster."""
    max_opens: int | None = None
    """Total number of sessions that this gateway may open on the server; None means no limit."""


Publish = Callable[[Sequence[ServerEndpoint]], None]


class EndpointSource(Protocol):
    """A source that lists the servers of one environment."""

    async def watch(self, publish: Publish) -> None:
        """Publish the whole list when it is first known and after each change, until cancelled."""

    async def close(self) -> None:
        """Stop what the source itself started."""
