"""Sessions of HTTP clients. They do not end with a connection.

    POST /reset ----> opens a session, and returns its id as a cookie and as X-Session-ID
    POST /step  --+-> with a cookie or header: uses that session
    GET /state  --+-> without either: uses a new environment for this call, like OpenEnv 0.2 and
                      later

Clients of OpenEnv 0.1 keep cookies, so their calls use the session. Clients of later versions
ignore cookies and never use it. A session without a call after its reset therefore ends soon, or
immediately when a full server needs room (`EvictableSessions`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.incoming.faults import shorten
from ludus.env.sessions.interface import OpenArgs, OpenResult, Sessions
from ludus.proto.errors import AuthenticationError, ErrorCode, SessionLostError

SESSION_COOKIE = "ludus_session"
SESSION_HEADER = "x-session-id"
TOOLS_SESSION_HEADER = "x-tools-session-id"
"""Response header with an id that can only be used to call the session's tools."""
UNUSED_TIMEOUT_S = 30.0
_MAX_ID_CHARS = 512


def read_session_id(request: Request) -> str | None:
    """Return the session id in a request's header or cookie, in this order, or None.

    Raises:
        SessionLostError: the id is too long.
    """
    session_id = request.headers.get(SESSION_HEADER) or request.cookies.get(SESSION_COOKIE)
    if session_id and len(session_id) > _MAX_ID_CHARS:
        raise SessionLostError(
            f"a session id must have at most {_MAX_ID_CHARS} characters, got {len(session_id)};"
            " reset without an id to open a session"
        )
    return session_id or None


def make_json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with JSON content, which may be an `orjson.Fragment`."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def make_session_headers(request: Request, session: OpenResult) -> dict[str, str]:
    """Return the headers that send the session ids to the client, with a cookie for this path."""
    path = request.scope.get("root_path", "") or "/"
    secure = "; Secure" if request.url.scheme == "https" else ""
    cookie = f"{SESSION_COOKIE}={session.session_id}; HttpOnly; SameSite=Lax; Path={path}{secure}"
    headers = {"set-cookie": cookie, SESSION_HEADER: session.session_id}
    if session.tools_session_id:
        headers[TOOLS_SESSION_HEADER] = session.tools_session_id
    return headers


def make_expired_cookie(request: Request) -> dict[str, str]:
    """Return the header of an expired cookie, which deletes the client's session cookie."""
    path = request.scope.get("root_path", "") or "/"
    return {"set-cookie": f"{SESSION_COOKIE}=; HttpOnly; SameSite=Lax; Path={path}; Max-Age=0"}


@contextlib.asynccontextmanager
async def use_session(
    sessions: Sessions, session_id: str | None, reset: ResetArgs | None = None
) -> AsyncIterator[str]:
    """Yield the id of a call's session. A call without an id gets a new session, closed afterwards.

    Args:
        reset: arguments of the first reset of a new session; None opens it without a reset.
    """
    if session_id is not None:
        yield session_id
        return
    new_session_id = (await sessions.open(OpenArgs(reset, with_text=False))).session_id
    try:
        yield new_session_id
    finally:
        await sessions.close(new_session_id)


async def require_session(sessions: Sessions, session_id: str) -> None:
    """Check that a session exists.

    Raises:
        SessionLostError: the session has ended, or it never existed.
    """
    try:
        await sessions.state(session_id)
    except (SessionLostError, AuthenticationError):
        raise _make_unknown_error(session_id) from None


def _make_unknown_error(session_id: str) -> SessionLostError:
    return SessionLostError(f"Unknown session_id: {shorten(session_id)}", ErrorCode.SESSION_ERROR)


class EvictableSessions:
    """Sessions that have had no call yet. A full server closes the oldest first."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._unused_ids: dict[str, None] = {}
        """Session ids, in the order in which the sessions were opened."""
        sessions.events.on_end.append(lambda session_id, tombstone: self.mark_used(session_id))
        sessions.events.on_shortage.append(self._evict_sessions)

    def add(self, session_id: str) -> None:
        """Allow the eviction of a session until it is used."""
        self._unused_ids[session_id] = None

    def mark_used(self, session_id: str) -> None:
        """Prevent the eviction of a session."""
        self._unused_ids.pop(session_id, None)

    async def _evict_sessions(self, num_missing: int) -> None:
        for session_id in list(itertools.islice(self._unused_ids, num_missing)):
            self.mark_used(session_id)
            await self._sessions.close(session_id)


class HttpSessions:
    """The implementation of `/reset`, `/step` and `/state`.

    Args:
        is_legacy: use the session that was reset last for calls without a session id, like OpenEnv
            0.1, whose clients may ignore cookies.
    """

    def __init__(
        self,
        sessions: Sessions,
        evictable: EvictableSessions,
        *,
        unused_timeout_s: float = UNUSED_TIMEOUT_S,
        is_legacy: bool = False,
    ) -> None:
        self._sessions = sessions
        self._evictable = evictable
        self._unused_timeout_s = unused_timeout_s
        self._is_legacy = is_legacy
        self._default_id: str | None = None
        self._is_default_named = False
        """True if a client used the default session's id; a new default then does not close it."""

    async def reset(self, session_id: str | None, args: ResetArgs) -> OpenResult:
        """Start an episode, and return the session with its first result.

        A new session is opened if there is no id, or if the session has ended.
        """
        if session_id is not None:
            try:
                result = await self._sessions.reset(session_id, args)
            except (SessionLostError, AuthenticationError):
                pass
            else:
                self.mark_session_used(session_id)
                return OpenResult(session_id, result)
        open_args = OpenArgs(args, linger_s=self._unused_timeout_s, with_text=False)
        open_result = await self._sessions.open(open_args)
        assert open_result.first_result is not None, "the session was opened with a reset"
        # The session ends after its linger time, unless a call uses it.
        await self._sessions.detach(open_result.session_id)
        self._evictable.add(open_result.session_id)
        if self._is_legacy:
            await self._replace_default(open_result.session_id)
        return open_result

    async def step(self, session_id: str | None, action: bytes, timeout_s: float) -> EncodedResult:
        """Return the result of an action."""
        session_id = self.mark_session_used(session_id)
        async with use_session(self._sessions, session_id, ResetArgs()) as call_session_id:
            return await self._sessions.step(call_session_id, action, 0, timeout_s)

    async def state(self, session_id: str | None) -> bytes:
        """Return the state of the session, or of a new environment if there is no session id."""
        session_id = self.mark_session_used(session_id)
        async with use_session(self._sessions, session_id) as call_session_id:
            return await self._sessions.state(call_session_id)

    def mark_session_used(self, session_id: str | None) -> str | None:
        """Mark a call's session as used and return its id, or None if the call has no session."""
        call_session_id = session_id or self._default_id
        if call_session_id is not None:
            self._evictable.mark_used(call_session_id)
            self._is_default_named |= session_id == self._default_id
        return call_session_id

    async def close(self, session_id: str | None) -> bool:
        """Close a call's session; return False if the call has no session.

        Raises:
            SessionLostError: there is no session with the call's id (code SESSION_ERROR).
        """
        call_session_id = session_id or self._default_id
        if call_session_id is None:
            return False
        if call_session_id == self._default_id:
            self._default_id = None
        if not await self._sessions.close(call_session_id) and session_id is not None:
            raise _make_unknown_error(session_id)
        return True

    async def _replace_default(self, session_id: str) -> None:
        previous_id, self._default_id = self._default_id, session_id
        was_default_named, self._is_default_named = self._is_default_named, False
        if previous_id is not None and not was_default_named:
            await self._sessions.close(previous_id)
