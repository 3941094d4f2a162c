"""The servers of one environment in a cluster: their endpoints and deletion costs.

    EndpointSlices --EndpointSliceSource--> publish
    loads ----------DeletionCostWriter----------> annotations of the pods, if this gateway leads

One gateway of a release holds the Lease and writes annotations; all of them route calls.
"""

from __future__ import annotations

import asyncio
import socket

from ludus.services.gateway.config import KubernetesEnvironment
from ludus.services.gateway.fleet.endpoints import Publish
from ludus.services.gateway.kubernetes.deletion_cost import DeletionCostWriter, ReadLoads
from ludus.services.gateway.kubernetes.follower import FollowOptions
from ludus.services.gateway.kubernetes.leadership import Leadership
from ludus.services.gateway.kubernetes.source import EndpointSliceSource
from ludus.services.kubernetes.api import KubernetesApi


class ClusterSource:
    """An `EndpointSource` for the pods behind a Service.

    Args:
        api: client that `close` closes.
        read_loads: returns the number of sessions and the capacity by pod.
    """

    def __init__(
        self,
        api: KubernetesApi,
        environment: KubernetesEnvironment,
        read_loads: ReadLoads,
        options: FollowOptions | None = None,
    ) -> None:
        self._api = api
        self._read_loads = read_loads
        self._namespace, self._lease = environment.namespace, environment.lease
        self._source = EndpointSliceSource(api, environment.namespace, environment.service, options)

    async def watch(self, publish: Publish) -> None:
        """Publish the pods, and write their deletion costs while leading, until cancelled.

        Raises:
            ConfigError: the Service has no port of environment servers.
        """
        if not self._lease:
            await self._source.watch(publish)
            return
        leadership = Leadership(self._api, self._namespace, self._lease, socket.gethostname())
        costs = DeletionCostWriter(
            self._api, self._namespace, self._read_loads, lambda: leadership.is_leader
        )
        async with leadership:
            cost_task = asyncio.create_task(costs.run())
            try:
                await self._source.watch(publish)
            finally:
                cost_task.cancel()
                await asyncio.gather(cost_task, return_exceptions=True)

    async def close(self) -> None:
        """Close all requests to the cluster."""
        await self._source.close()
        await self._api.close()
