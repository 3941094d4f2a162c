"""Session ids that route themselves: environment, server, tenant and expiry, signed.

    blackjack~3f9a0c~team-a~6920c1f0~6922134f~kq3v0w2d9b1x~5m0u...   (text, safe in headers)
    env       server  tenant issued   expires  nonce        HMAC-SHA256, 16 bytes

    ...~kq3v0w2d9b1x~tools~9c1e...      the same session, for calls of its tools alone

Nobody without the key makes the first of the second: what is signed differs, and the signature is
what an id is secret by. An agent gets the second, whoever trains it keeps the first.
Whoever has the key can route a call with nothing but its session id, so gateways share no
store; a server with the same key lets a client open a session that a gateway admitted.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    EnvError,
    PermissionDeniedError,
    SessionLostError,
    error_from_wire,
)

MIN_KEY_BYTES = 16
OPEN_WITHIN_S = 60.0
"""An id that was not opened by then cannot be opened any more."""
_NAME = re.compile(r"[A-Za-z0-9._-]{0,63}")
_NUM_PARTS = 6
"""Without the signature."""
_TOOLS = "tools"
"""The part that an id has more which may call tools alone."""
_MAX_ID_CHARS = 400


@dataclass(frozen=True, slots=True)
class SignedId:
    """What a signed session id says."""

    environment: str
    server_id: str
    tenant: str
    issued_s: int
    """Unix time."""
    expires_s: int
    nonce: str
    session_id: str
    """The id that drives the session; for ids that may call tools alone, it is another one."""
    is_tools_only: bool = False


class SessionKey:
    """Signs and reads session ids.

    Args:
        secret: at least 16 bytes, the same on every gateway and server of a fleet.

    Raises:
        ConfigError: the secret is too short.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_KEY_BYTES:
            raise ConfigError(
                f"expected a session key of at least {MIN_KEY_BYTES} bytes, got {len(secret)};"
                " make one with: openssl rand -hex 32"
            )
        self._secret = secret

    @classmethod
    def random(cls) -> SessionKey:
        """A key that nobody else has."""
        return cls(secrets.token_bytes(32))

    def sign(
        self, environment: str, server_id: str, *, tenant: str = "", lifetime_s: float = 86_400.0
    ) -> str:
        """A new session id."""
        for name in (environment, server_id, tenant):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"expected letters, digits, '.', '_' and '-', at most 63; got {name!r}"
                )
        now_s = int(time.time())
        body = "~".join(
            (
                environment,
                server_id,
                tenant,
                f"{now_s:x}",
                f"{now_s + int(lifetime_s):x}",
                secrets.token_urlsafe(9),
            )
        )
        return f"{body}~{self._mac(body)}"

    def tools_id(self, session_id: str) -> str:
        """The id under which the session's tools can be called, and nothing else."""
        body = f"{session_id.rpartition('~')[0]}~{_TOOLS}"
        return f"{body}~{self._mac(body)}"

    def read(self, session_id: str) -> SignedId:
        """What the id says.

        Raises:
            AuthenticationError: it is not an id that this key signed.
            SessionLostError: it has expired.
        """
        body, _, mac = session_id.rpartition("~")
        parts = body.split("~")
        if (
            len(session_id) > _MAX_ID_CHARS
            or parts[_NUM_PARTS:] not in ([], [_TOOLS])
            or len(parts) < _NUM_PARTS
            or not hmac.compare_digest(mac.encode(), self._mac(body).encode())
        ):
            raise AuthenticationError(
                "expected a session id that this fleet signed, got another one; open a session"
            )
        is_tools_only = len(parts) > _NUM_PARTS
        if is_tools_only:
            driving = "~".join(parts[:_NUM_PARTS])
            session_id = f"{driving}~{self._mac(driving)}"
        found = SignedId(
            environment=parts[0],
            server_id=parts[1],
            tenant=parts[2],
            issued_s=int(parts[3], 16),
            expires_s=int(parts[4], 16),
            nonce=parts[5],
            session_id=session_id,
            is_tools_only=is_tools_only,
        )
        if found.expires_s < time.time():
            raise SessionLostError("the session id has expired; open a new session")
        return found

    def _mac(self, body: str) -> str:
        digest = hmac.digest(self._secret, body.encode(), "sha256")
        return base64.urlsafe_b64encode(digest[:16]).decode().rstrip("=")


def tools_only_error() -> PermissionDeniedError:
    """What a call is answered with that wants more of a session than the tools."""
    return PermissionDeniedError(
        "expected the id that drives the session, got the one that may call its tools alone;"
        " only whoever opened the session has the other"
    )


@contextlib.contextmanager
def hide_driving_id(session_id: str, given_id: str) -> Iterator[None]:
    """Raise errors as if the session had the id that the caller gave and no other."""
    try:
        yield
    except EnvError as error:
        if session_id == given_id or session_id not in error.message:
            raise
        message = error.message.replace(session_id, given_id)
        raise error_from_wire(error.code, message, error.retry_after_s) from None


class SessionIdIssuer:
    """Decides under which ids sessions of one server may be opened.

    Args:
        server_id: signed ids must name it.
        key: None refuses ids that callers bring.
    """

    def __init__(self, server_id: str, key: SessionKey | None) -> None:
        self._server_id = server_id
        self._key = key
        self._used: OrderedDict[str, float] = OrderedDict()

    def choose(self, wanted: str) -> str:
        """A fresh id where none is wanted, else the wanted one, which is used up by this.

        Raises:
            AuthenticationError: it is not signed with this server's key.
            SessionLostError: it is for another server, too old, or was used before.
        """
        if not wanted:
            return secrets.token_urlsafe(18)
        if self._key is None:
            raise AuthenticationError(
                "expected no session id in an open: this server has no session key; start it"
                " with the gateway's LUDUS_SESSION_KEY"
            )
        signed = self._key.read(wanted)
        if signed.is_tools_only:
            raise tools_only_error()
        now_s = time.time()
        while self._used and next(iter(self._used.values())) < now_s - 2 * OPEN_WITHIN_S:
            self._used.popitem(last=False)
        is_late = signed.issued_s < now_s - OPEN_WITHIN_S
        if signed.server_id != self._server_id or is_late or wanted in self._used:
            raise SessionLostError(
                "expected a session id that was issued for this server just now and is not used"
                " yet; ask the gateway for a new one"
            )
        self._used[wanted] = now_s
        return wanted


def new_server_id() -> str:
    """The name of a server process in session ids, where its pod has none."""
    return secrets.token_hex(6)


def pod_server_id(pod_uid: str) -> str:
    """The name in session ids of the server that runs in a pod: its uid without dashes.

    A gateway reads the uid in the cluster's EndpointSlices, the pod its own in POD_UID (through
    the downward API, `metadata.uid`), so both know the name without asking each other.

    Raises:
        ConfigError: it is no uid.
    """
    name = pod_uid.replace("-", "").lower()
    if not name or not _NAME.fullmatch(name):
        raise ConfigError(
            f"expected a pod's uid, such as 8c5f7a3e-0b1d-4c7e-9a55-2f7d1c0e4b6a, got {pod_uid!r};"
            " set POD_UID from metadata.uid through the downward API"
        )
    return name
