"""Sessions of HTTP clients, which have no connection to hold them by.

    POST /reset ----> a session, offered as cookie and X-Session-ID
    POST /step  --+-> named by cookie or header: that session
    GET /state  --+-> named by nobody: an environment for this one call, as OpenEnv 0.2+ does

Clients of OpenEnv 0.1 keep cookies and so get a session of their own without knowing it; those
of 0.2 and later never come back. A session nobody has come back to therefore ends soon, and
at once when a full server needs its place (`EvictableSessions`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping

from starlette.requests import Request

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.sessions.interface import OpenArgs, Opened, Sessions
from ludus.proto.errors import AuthenticationError, SessionLostError

SESSION_COOKIE = "ludus_session"
SESSION_HEADER = "x-session-id"
TOOLS_SESSION_HEADER = "x-tools-session-id"
"""Offers the id that calls the session's tools and does nothing else."""
UNUSED_TIMEOUT_S = 30.0
_MAX_ID_CHARS = 512


def named_session(headers: Mapping[str, str], cookies: Mapping[str, str]) -> str | None:
    """The session that a request names, None when it names none; the header wins.

    Raises:
        SessionLostError: what it names can be no session id.
    """
    named = headers.get(SESSION_HEADER) or cookies.get(SESSION_COOKIE)
    if named and len(named) > _MAX_ID_CHARS:
        raise SessionLostError(
            f"expected a session id of at most {_MAX_ID_CHARS} characters, got {len(named)};"
            " reset without one opens a session"
        )
    return named or None


def session_headers(request: Request, opened: Opened) -> dict[str, str]:
    """What offers a session to the client: a cookie for this mount path, and a header."""
    path = request.scope.get("root_path", "") or "/"
    secure = "; Secure" if request.url.scheme == "https" else ""
    cookie = f"{SESSION_COOKIE}={opened.session_id}; HttpOnly; SameSite=Lax; Path={path}{secure}"
    headers = {"set-cookie": cookie, SESSION_HEADER: opened.session_id}
    if opened.tools_session_id:
        headers[TOOLS_SESSION_HEADER] = opened.tools_session_id
    return headers


def forget_header(request: Request) -> dict[str, str]:
    """What makes the client forget its session."""
    path = request.scope.get("root_path", "") or "/"
    return {"set-cookie": f"{SESSION_COOKIE}=; HttpOnly; SameSite=Lax; Path={path}; Max-Age=0"}


@contextlib.asynccontextmanager
async def fresh_session(sessions: Sessions, reset: ResetArgs | None = None) -> AsyncIterator[str]:
    """A session for one call that names none; it is closed after it."""
    session_id = (await sessions.open(OpenArgs(reset, with_text=False))).session_id
    try:
        yield session_id
    finally:
        await sessions.close(session_id)


class EvictableSessions:
    """Sessions that nobody has called since they were opened, oldest first."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._unused: dict[str, None] = {}  # keeps their order
        sessions.events.on_end.append(lambda session_id, why: self.used(session_id))
        sessions.events.on_shortage.append(self._make_room)

    def add(self, session_id: str) -> None:
        """Mark a session as one that can be spared until it is used."""
        self._unused[session_id] = None

    def used(self, session_id: str) -> None:
        """Mark a session as one that somebody needs."""
        self._unused.pop(session_id, None)

    async def _make_room(self, num_missing: int) -> None:
        for session_id in list(itertools.islice(self._unused, num_missing)):
            self.used(session_id)
            await self._sessions.close(session_id)


class HttpSessions:
    """What `/reset`, `/step` and `/state` do.

    Args:
        legacy: calls that name no session go to the one that was reset last, as in OpenEnv
            0.1, whose clients may keep no cookies.
    """

    def __init__(
        self,
        sessions: Sessions,
        spare: EvictableSessions,
        *,
        unused_timeout_s: float = UNUSED_TIMEOUT_S,
        legacy: bool = False,
    ) -> None:
        self._sessions = sessions
        self._spare = spare
        self._unused_timeout_s = unused_timeout_s
        self._legacy = legacy
        self._default: str | None = None
        self._default_is_named = False
        """True when a client holds the default by name: it outlives being the default."""

    async def reset(self, named: str | None, args: ResetArgs) -> Opened:
        """The session with the first answer of its new episode; a gone session is replaced."""
        if named is not None:
            try:
                result = await self._sessions.reset(named, args)
            except (SessionLostError, AuthenticationError):
                pass
            else:
                self.use(named)
                return Opened(named, result)
        opened = await self._sessions.open(
            OpenArgs(args, linger_s=self._unused_timeout_s, with_text=False)
        )
        assert opened.first is not None, "it was opened with a reset"
        # Lingering ends what nobody calls again; a call makes the session an ordinary one.
        await self._sessions.detach(opened.session_id)
        self._spare.add(opened.session_id)
        if self._legacy:
            await self._make_default(opened.session_id)
        return opened

    async def step(self, named: str | None, action: bytes, timeout_s: float) -> EncodedResult:
        """The answer to an action.

        Raises:
            SessionLostError: the session that was named is gone.
        """
        session_id = self.use(named)
        if session_id is not None:
            return await self._sessions.step(session_id, action, 0, timeout_s)
        async with fresh_session(self._sessions, ResetArgs()) as session_id:
            return await self._sessions.step(session_id, action, 0, timeout_s)

    async def state(self, named: str | None) -> bytes:
        """The state; of a new environment where no session is named."""
        session_id = self.use(named)
        if session_id is not None:
            return await self._sessions.state(session_id)
        async with fresh_session(self._sessions) as session_id:
            return await self._sessions.state(session_id)

    def use(self, named: str | None) -> str | None:
        """The session that a call acts on, which is in use from now; None for a fresh one."""
        session_id = named or self._default
        if session_id is not None:
            self._spare.used(session_id)
            self._default_is_named |= named == self._default
        return session_id

    async def close(self, named: str | None) -> bool:
        """True when a session was named; it is ended now."""
        session_id = named or self._default
        if session_id is None:
            return False
        if session_id == self._default:
            self._default = None
        await self._sessions.close(session_id)
        return True

    async def _make_default(self, session_id: str) -> None:
        previous, self._default = self._default, session_id
        was_named, self._default_is_named = self._default_is_named, False
        if previous is not None and not was_named:
            await self._sessions.close(previous)
