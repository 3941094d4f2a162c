"""Sessions of HTTP clients, which are not tied to a connection.

    POST /reset ----> opens a session, and returns its id as a cookie and as X-Session-ID
    POST /step  --+-> with a cookie or header: uses that session
    GET /state  --+-> without: uses a new environment for this call, like OpenEnv 0.2 and later

Clients of OpenEnv 0.1 keep cookies and therefore use their session. Clients of later versions
ignore it. A session without a call after its reset therefore ends soon, or immediately when a full
server needs room (`EvictableSessions`).
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
from ludus.env.sessions.interface import OpenArgs, OpenResult, Sessions
from ludus.proto.errors import AuthenticationError, ErrorCode, SessionLostError

SESSION_COOKIE = "ludus_session"
SESSION_HEADER = "x-session-id"
TOOLS_SESSION_HEADER = "x-tools-session-id"
"""Response header with the id that can only call the session's tools."""
UNUSED_TIMEOUT_S = 30.0
_MAX_ID_CHARS = 512
_MAX_SHOWN_CHARS = 200


def named_session(request: Request) -> str | None:
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


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with JSON content, which may be an `orjson.Fragment`."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def session_headers(request: Request, opened: OpenResult) -> dict[str, str]:
    """Return the headers that pass a session to the client, including a cookie for this path."""
    path = request.scope.get("root_path", "") or "/"
    secure = "; Secure" if request.url.scheme == "https" else ""
    cookie = f"{SESSION_COOKIE}={opened.session_id}; HttpOnly; SameSite=Lax; Path={path}{secure}"
    headers = {"set-cookie": cookie, SESSION_HEADER: opened.session_id}
    if opened.tools_session_id:
        headers[TOOLS_SESSION_HEADER] = opened.tools_session_id
    return headers


def forget_header(request: Request) -> dict[str, str]:
    """Return the header that deletes the client's session cookie."""
    path = request.scope.get("root_path", "") or "/"
    return {"set-cookie": f"{SESSION_COOKIE}=; HttpOnly; SameSite=Lax; Path={path}; Max-Age=0"}


@contextlib.asynccontextmanager
async def session_for_call(
    sessions: Sessions, session_id: str | None, reset: ResetArgs | None = None
) -> AsyncIterator[str]:
    """Yield the id of a call's session. A call without an id gets a new session for itself.

    Args:
        reset: arguments of the first reset of a new session; None opens it without a reset.
    """
    if session_id is not None:
        yield session_id
        return
    new_id = (await sessions.open(OpenArgs(reset, with_text=False))).session_id
    try:
        yield new_id
    finally:
        await sessions.close(new_id)


async def require_session(sessions: Sessions, session_id: str) -> None:
    """Check that a session exists.

    Raises:
        SessionLostError: the session has ended, or it never existed.
    """
    try:
        await sessions.state(session_id)
    except (SessionLostError, AuthenticationError):
        raise SessionLostError(
            f"Unknown session_id: {shorten(session_id)}", ErrorCode.SESSION_ERROR
        ) from None


def shorten(text: str) -> str:
    """Return the text, or its beginning if it is long, for a message."""
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


class EvictableSessions:
    """Sessions without a call since they were opened, oldest first."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._unused: dict[str, None] = {}
        """Session ids in the order of their opening."""
        sessions.events.on_end.append(lambda session_id, tombstone: self.mark_used(session_id))
        sessions.events.on_shortage.append(self._make_room)

    def add(self, session_id: str) -> None:
        """Allow the eviction of a session until it is used."""
        self._unused[session_id] = None

    def mark_used(self, session_id: str) -> None:
        """Prevent the eviction of a session."""
        self._unused.pop(session_id, None)

    async def _make_room(self, num_missing: int) -> None:
        for session_id in list(itertools.islice(self._unused, num_missing)):
            self.mark_used(session_id)
            await self._sessions.close(session_id)


class HttpSessions:
    """The implementation of `/reset`, `/step` and `/state`.

    Args:
        legacy: pass calls without a session id to the session that was reset last, like OpenEnv
            0.1, whose clients may ignore cookies.
    """

    def __init__(
        self,
        sessions: Sessions,
        evictable: EvictableSessions,
        *,
        unused_timeout_s: float = UNUSED_TIMEOUT_S,
        legacy: bool = False,
    ) -> None:
        self._sessions = sessions
        self._evictable = evictable
        self._unused_timeout_s = unused_timeout_s
        self._legacy = legacy
        self._default: str | None = None
        self._default_is_named = False
        """True if a client used the default session's id, so that it stays open after a reset."""

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
                self.use(session_id)
                return OpenResult(session_id, result)
        opened_session = await self._sessions.open(
            OpenArgs(args, linger_s=self._unused_timeout_s, with_text=False)
        )
        assert opened_session.first is not None, "the session was opened with a reset"
        # The session ends after its linger time, unless a call makes it an ordinary session.
        await self._sessions.detach(opened_session.session_id)
        self._evictable.add(opened_session.session_id)
        if self._legacy:
            await self._make_default(opened_session.session_id)
        return opened_session

    async def step(self, session_id: str | None, action: bytes, timeout_s: float) -> EncodedResult:
        """Return the result of an action."""
        async with session_for_call(self._sessions, self.use(session_id), ResetArgs()) as used_id:
            return await self._sessions.step(used_id, action, 0, timeout_s)

    async def state(self, session_id: str | None) -> bytes:
        """Return the session's state, or that of a new environment if there is no session id."""
        async with session_for_call(self._sessions, self.use(session_id)) as used_id:
            return await self._sessions.state(used_id)

    def use(self, session_id: str | None) -> str | None:
        """Mark a call's session as used and return its id, or None if the call has no session."""
        used_id = session_id or self._default
        if used_id is not None:
            self._evictable.mark_used(used_id)
            self._default_is_named |= session_id == self._default
        return used_id

    async def close(self, session_id: str | None) -> bool:
        """Close a call's session; return False if the call has no session."""
        closed_id = session_id or self._default
        if closed_id is None:
            return False
        if closed_id == self._default:
            self._default = None
        await self._sessions.close(closed_id)
        return True

    async def _make_default(self, session_id: str) -> None:
        previous_id, self._default = self._default, session_id
        was_named, self._default_is_named = self._default_is_named, False
        if previous_id is not None and not was_named:
            await self._sessions.close(previous_id)
