"""A follower of a list of cluster objects, which survives failures of the API server.

    API server --LIST--> on_list --WATCH--> on_event --the watch ends--> WATCH again
                            ^-------------- too old to continue ----------'

No callback except `on_failure` runs before the first LIST has succeeded. If the API server is
unreachable later, the last known list stays valid.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from ludus.env.backoff import generate_pauses
from ludus.env.types import JsonObject
from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.api import EventType, KubernetesApi, WatchEvent

_log = logging.getLogger(__name__)

RETRY_PAUSES_S = (0.5, 30.0)
"""The first and the longest pause before a retry, in seconds."""
_WATCH_TIMEOUT_S = 300
"""Maximum duration of a watch, in seconds. Each watch requests a random 80 to 100 % of it, so that
gateways that started together do not reconnect together."""
_STABLE_AFTER_S = 10.0
"""Duration in seconds after which a watch counts as successful, even without events."""
_BAD_VERSION_STATUSES = frozenset({400, 410, 504})
"""Statuses of a resourceVersion that is too old, or unknown after the API server was restored."""
_MAX_FAILURES = 3
"""Number of consecutive failed watches after which the list is read again."""


class ListFollower:
    """A follower of the objects that are at a path and match a label selector.

    Args:
        description: description of the objects, for the log.
        on_list: called with all objects after each LIST.
        on_event: called with each event, except bookmarks.
        on_failure: called with the error of each failed request.
        pauses_s: the first and the longest pause before a retry, in seconds.
        sleep: function that waits between two attempts.
    """

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        selector: str,
        description: str,
        on_list: Callable[[Sequence[JsonObject]], None],
        on_event: Callable[[WatchEvent], None],
        *,
        on_failure: Callable[[ClusterError], None] | None = None,
        pauses_s: tuple[float, float] = RETRY_PAUSES_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._path, self._query = path, {"labelSelector": selector}
        self._description = description
        self._on_list, self._on_event, self._on_failure = on_list, on_event, on_failure
        self._pauses_s = pauses_s
        self._sleep = sleep
        self._version = ""
        """resourceVersion from which a watch resumes; empty if the list must be read again."""
        self._logged_status = -1
        """Status of the failure that was logged last; -1 after a success."""
        self._num_failures = 0
        """Number of failed watches after the last message from the API server."""

    async def run(self) -> None:
        """Follow until cancelled, or until `on_list` or `on_event` raises a ConfigError."""
        pauses = generate_pauses(*self._pauses_s)
        while True:
            started_s, old_version = time.monotonic(), self._version
            failure: ClusterError | None = None
            try:
                if not self._version:
                    await self._read_list()
                await self._watch_changes()
            except ClusterError as error:
                failure = error
            except (LookupError, TypeError) as error:
                failure = ClusterError(f"an object has an unexpected form: {error!r}")
            if failure is not None:
                self._record_failure(failure)
            if self._version != old_version or time.monotonic() - started_s >= _STABLE_AFTER_S:
                pauses = generate_pauses(*self._pauses_s)
                if failure is None:
                    continue
            retry_after_s = failure.retry_after_s if failure is not None else 0.0
            pause_s = min(max(next(pauses), retry_after_s), self._pauses_s[1])
            await self._sleep(pause_s * random.uniform(0.5, 1.0))

    async def _read_list(self) -> None:
        list_object = await self._api.read(self._path, self._query)
        self._record_success()
        self._on_list(list_object.get("items") or ())
        self._version = str((list_object.get("metadata") or {}).get("resourceVersion", ""))

    async def _watch_changes(self) -> None:
        watch = self._api.watch(
            self._path,
            version=self._version,
            timeout_s=round(_WATCH_TIMEOUT_S * random.uniform(0.8, 1.0)),
            query=self._query,
        )
        async with aclosing(watch) as events:
            async for event in events:
                self._record_success()
                metadata = event.object.get("metadata") or {}
                self._version = str(metadata.get("resourceVersion") or self._version)
                if event.type != EventType.BOOKMARK:
                    self._on_event(event)

    def _record_failure(self, error: ClusterError) -> None:
        was_watching = bool(self._version)
        self._num_failures += was_watching
        is_bad_version = (
            error.status in _BAD_VERSION_STATUSES or "resource version" in str(error).lower()
        )
        if was_watching and (is_bad_version or self._num_failures >= _MAX_FAILURES):
            _log.info("%s: the watch cannot continue; listing again", self._description)
            self._version = ""
        elif error.status != self._logged_status:
            self._logged_status = error.status
            _log.warning("%s: keeping the last known list: %s", self._description, error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _record_success(self) -> None:
        self._num_failures = 0
        if self._logged_status >= 0:
            self._logged_status = -1
            _log.info("%s: the API server responds again", self._description)
