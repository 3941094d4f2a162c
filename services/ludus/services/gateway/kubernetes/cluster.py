"""The servers of one environment in a cluster: where they are, and which should go first.

    EndpointSlices --EndpointSliceSource--> publish
    loads ----------DeletionCost----------> annotations of the pods, if this gateway leads

One gateway of a release holds the Lease and writes; each of them routes.
"""

from __future__ import annotations

import asyncio
import socket

from ludus.services.gateway.config import KubernetesEnvironment
from ludus.services.gateway.fleet.endpoints import Publish
from ludus.services.gateway.kubernetes.deletion_cost import DeletionCost, Loads
from ludus.services.gateway.kubernetes.following import FollowOptions
from ludus.services.gateway.kubernetes.leadership import Leadership
from ludus.services.gateway.kubernetes.source import EndpointSliceSource
from ludus.services.kubernetes.api import KubernetesApi


class ClusterSource:
    """The pods behind a Service, as an `EndpointSource`.

    Args:
        api: closed with the source.
        loads: sessions and capacity by pod.
    """

    def __init__(
        self,
        api: KubernetesApi,
        environment: KubernetesEnvironment,
        loads: Loads,
        options: FollowOptions | None = None,
    ) -> None:
        self._api = api
        self._loads = loads
        self._namespace, self._lease = environment.namespace, environment.lease
        self._source = EndpointSliceSource(api, environment.namespace, environment.service, options)

    async def watch(self, publish: Publish) -> None:
        """Publish the pods, and keep their deletion costs while it leads, for ever.

        Raises:
            ConfigError: the Service cannot be that of environment servers.
        """
        if not self._lease:
            await self._source.watch(publish)
            return
        leadership = Leadership(self._api, self._namespace, self._lease, socket.gethostname())
        costs = DeletionCost(self._api, self._namespace, self._loads, lambda: leadership.is_leader)
        async with leadership:
            writing = asyncio.create_task(costs.run())
            try:
                await self._source.watch(publish)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def close(self) -> None:
        """End all requests to the cluster."""
        await self._source.close()
        await self._api.close()
