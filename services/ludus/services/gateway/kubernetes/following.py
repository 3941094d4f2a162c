"""A list of a cluster's objects, followed whatever happens to the API server meanwhile.

    API server --LIST--> on_list --WATCH--> on_event --the watch ends--> WATCH again
                            ^-------------- too old to continue ----------'

Nobody hears anything before the first LIST has succeeded. After that an unreachable API server
changes nothing: what was known stays. Who waits for whom: nobody waits for this; it waits for
the API server.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ludus.env.backoff import doubling
from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.api import EventType, JsonObject, KubernetesApi, WatchEvent

_log = logging.getLogger(__name__)

_STEADY_S = 10.0
"""A watch that lasted so long, or said something, was a good one."""
_GONE = 410
_BAD_VERSION = frozenset({400, 504})
"""What a version is answered with that the API server does not have, as after it was restored."""
_MAX_FAILURES = 3
"""Watches that fail in a row before the list is read again, whatever they failed with."""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How patient it is."""

    watch_timeout_s: int = 300
    """The server is asked to end a watch after 80 to 100 % of this, so that gateways which
    started together do not come back together."""
    first_retry_s: float = 0.5
    max_retry_s: float = 30.0


class Following:
    """The objects at a path that a label selector names.

    Args:
        name: what they are, for the log.
        on_list: given all of them after each LIST.
        on_event: given each change; bookmarks are left out.
        on_failure: told each request that failed.
        sleep: what waits between two tries.
    """

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        selector: str,
        name: str,
        on_list: Callable[[Sequence[JsonObject]], None],
        on_event: Callable[[WatchEvent], None],
        *,
        on_failure: Callable[[ClusterError], None] | None = None,
        options: FollowOptions | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._path, self._query = path, {"labelSelector": selector}
        self._name = name
        self._on_list, self._on_event, self._on_failure = on_list, on_event, on_failure
        self._options = options or FollowOptions()
        self._sleep = sleep
        self._version = ""
        """Where a watch continues; empty when the list has to be read again."""
        self._problem = -1
        """The status of the failure that was told; -1 while there is none."""
        self._num_failures = 0
        """Watches that failed since the API server last said something."""

    async def run(self) -> None:
        """Follow for ever; what `on_list` and `on_event` raise ends it."""
        options = self._options
        pauses = doubling(options.first_retry_s, options.max_retry_s)
        while True:
            started_s, before = time.monotonic(), self._version
            failed: ClusterError | None = None
            try:
                if not self._version:
                    await self._list()
                await self._follow()
            except ClusterError as error:
                failed = error
                self._note(error)
                if self._on_failure is not None:
                    self._on_failure(error)
            if self._version != before or time.monotonic() - started_s >= _STEADY_S:
                pauses = doubling(options.first_retry_s, options.max_retry_s)
                if failed is None:
                    continue
            asked_s = failed.retry_after_s if failed is not None else 0.0
            pause_s = min(max(next(pauses), asked_s), options.max_retry_s)
            await self._sleep(pause_s * random.uniform(0.5, 1.0))

    async def _list(self) -> None:
        found = await self._api.read(self._path, self._query)
        self._note_answer()
        self._on_list(found.get("items") or ())
        self._version = str((found.get("metadata") or {}).get("resourceVersion", ""))

    async def _follow(self) -> None:
        watch = self._api.watch(
            self._path,
            version=self._version,
            timeout_s=max(1, round(self._options.watch_timeout_s * random.uniform(0.8, 1.0))),
            query=self._query,
        )
        async with aclosing(watch) as events:
            async for event in events:
                self._note_answer()
                metadata = event.object.get("metadata") or {}
                self._version = str(metadata.get("resourceVersion") or self._version)
                if event.type != EventType.BOOKMARK:
                    self._on_event(event)

    def _note(self, error: ClusterError) -> None:
        is_watch = bool(self._version)
        self._num_failures += is_watch
        if is_watch and (error.status == _GONE or self._is_bad_version(error)):
            _log.info("%s cannot be followed from the last look on; listing again", self._name)
            self._version = ""
        elif error.status != self._problem:
            self._problem = error.status
            _log.warning("%s: what was last known stays: %s", self._name, error)

    def _is_bad_version(self, error: ClusterError) -> bool:
        says_so = error.status in _BAD_VERSION or "resource version" in str(error).lower()
        return says_so or self._num_failures >= _MAX_FAILURES

    def _note_answer(self) -> None:
        self._num_failures = 0
        if self._problem >= 0:
            self._problem = -1
            _log.info("%s: the API server answers again", self._name)
