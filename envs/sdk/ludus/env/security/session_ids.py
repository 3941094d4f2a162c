"""Signed session ids, which contain the environment, server, tenant and expiry for routing.

    blackjack~3f9a0c~team-a~6920c1f0~6922134f~kq3v0w2d9b1x~5m0u...   (text, safe in headers)
    env       server  tenant issued   expires  nonce        HMAC-SHA256, 16 bytes

    ...~kq3v0w2d9b1x~tools~9c1e...      the same session, restricted to tool calls

A tools id cannot be turned into a session id without the key, because the two signatures cover
different texts. An agent gets the tools id; the trainer keeps the session id.
With the key, a call can be routed by its session id alone, so gateways need no shared store.

    session key --HMAC of the server id--> server key, which signs the ids of one server

Gateways have the session key. A server only needs its server key to let a client open a session
that a gateway admitted, so code that reads a server's memory cannot sign ids of other servers. The
tokens of servers are derived in the same way.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ludus.env.security.secret_files import MIN_SECRET_CHARS, ReadSecrets
from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    EnvError,
    PermissionDeniedError,
    SessionLostError,
    make_wire_error,
)

SESSION_KEY_VARIABLE = "LUDUS_SESSION_KEY"
"""Environment variable with the key, which must not be an argument."""
SERVER_KEY_VARIABLE = "LUDUS_SERVER_KEY"
"""Environment variable with the server key of one server, derived from the session key."""
MIN_KEY_BYTES = MIN_SECRET_CHARS
MAX_OPEN_DELAY_S = 300.0
"""Maximum time between the issue of a signed id and its open, and so the maximum difference between
the clocks of a gateway and its servers; later opens are refused."""
_NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{0,63}")
_NUM_PARTS = 6
"""Number of parts before the signature."""
_TOOLS_MARK = "tools"
"""Additional part of a tools id, which permits only tool calls."""
_MAX_ID_CHARS = 400


@dataclass(frozen=True, slots=True)
class SignedId:
    """The content of a signed session id."""

    environment: str
    server_id: str
    tenant: str
    issued_s: int
    """Unix time in seconds."""
    expires_s: int
    nonce: str
    session_id: str
    """Full id of the session, also if a tools id was read."""
    is_tools_only: bool = False


def derive_server_key(session_key: str, server_id: str) -> str:
    """Return the key that signs the session ids of one server only."""
    return _derive(session_key, "server key", server_id)


def derive_server_token(environment_token: str, server_id: str) -> str:
    """Return the token that one server only accepts."""
    return _derive(environment_token, "server token", server_id)


def _derive(secret: str, purpose: str, server_id: str) -> str:
    text = f"ludus {purpose} {server_id}"
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


class SessionKey:
    """Signs and verifies session ids of all servers of a fleet.

    Itsdangerous is not used: its signatures are twice as long, and ids travel with every call.

    Args:
        secret: at least 16 bytes, the same on every gateway of a fleet; or a function that returns
            the current secrets. The first secret signs, and every secret verifies.

    Raises:
        ConfigError: the secret is too short.
    """

    def __init__(self, secret: bytes | ReadSecrets) -> None:
        if isinstance(secret, bytes):
            check_session_key(secret)
            secrets_now = (secret.decode("utf-8", "backslashreplace"),)
            self._read_secrets: ReadSecrets = lambda: secrets_now
        else:
            self._read_secrets = secret

    @classmethod
    def random(cls) -> SessionKey:
        """Make a key from random bytes."""
        return cls(secrets.token_hex(32).encode())

    @property
    def current_secrets(self) -> tuple[str, ...]:
        """Current secrets. An id that was verified with other secrets must be verified again."""
        return self._read_secrets()

    def sign(
        self, environment: str, server_id: str, *, tenant: str = "", lifetime_s: float = 86_400.0
    ) -> str:
        """Make a new session id."""
        for name in (environment, server_id, tenant):
            if not _NAME_PATTERN.fullmatch(name):
                raise ConfigError(
                    f"name {name!r} must have at most 63 letters, digits, '.', '_' or '-'"
                )
        now_s = int(time.time())
        times = f"{now_s:x}~{now_s + int(lifetime_s):x}"
        unsigned_id = "~".join((environment, server_id, tenant, times, secrets.token_urlsafe(9)))
        return f"{unsigned_id}~{_make_signature(self.list_server_keys(server_id)[0], unsigned_id)}"

    def make_tools_id(self, session_id: str) -> str:
        """Return the session's tools id, which permits only tool calls.

        Raises:
            AuthenticationError: the session id is not signed with this key.
        """
        unsigned_id, _, signature = session_id.rpartition("~")
        server_key = self._find_server_key(unsigned_id, signature)
        unsigned_tools_id = f"{unsigned_id}~{_TOOLS_MARK}"
        return f"{unsigned_tools_id}~{_make_signature(server_key, unsigned_tools_id)}"

    def read(self, session_id: str) -> SignedId:
        """Verify an id and return its content.

        Raises:
            AuthenticationError: the id is not signed with this key.
            SessionLostError: the id has expired.
        """
        unsigned_id, _, signature = session_id.rpartition("~")
        parts = unsigned_id.split("~")
        is_tools_only = parts[_NUM_PARTS:] == [_TOOLS_MARK]
        if len(session_id) > _MAX_ID_CHARS or len(parts) != _NUM_PARTS + is_tools_only:
            raise _make_signature_error()
        server_key = self._find_server_key(unsigned_id, signature)
        if is_tools_only:
            unsigned_id = "~".join(parts[:_NUM_PARTS])
            session_id = f"{unsigned_id}~{_make_signature(server_key, unsigned_id)}"
        environment, server_id, tenant, issued, expires, nonce = parts[:_NUM_PARTS]
        issued_s, expires_s = int(issued, 16), int(expires, 16)
        if expires_s < time.time():
            raise SessionLostError("the session id has expired; open a new session")
        return SignedId(
            environment, server_id, tenant, issued_s, expires_s, nonce, session_id, is_tools_only
        )

    def list_server_keys(self, server_id: str) -> Sequence[str]:
        """Return the keys of ids of this server, the one that signs first."""
        return [derive_server_key(secret, server_id) for secret in self._read_secrets()]

    def _find_server_key(self, unsigned_id: str, signature: str) -> str:
        for server_key in self.list_server_keys(find_server_id(unsigned_id)):
            expected_signature = _make_signature(server_key, unsigned_id)
            if hmac.compare_digest(signature.encode(), expected_signature.encode()):
                return server_key
        raise _make_signature_error()


class ServerKey(SessionKey):
    """Verifies the session ids of one server.

    Args:
        read_server_keys: returns the current server keys.
    """

    def __init__(self, read_server_keys: ReadSecrets, server_id: str) -> None:
        super().__init__(read_server_keys)
        self._server_id = server_id

    def list_server_keys(self, server_id: str) -> Sequence[str]:
        """Return the server's keys; none for other servers."""
        return self.current_secrets if server_id == self._server_id else ()


def check_session_key(secret: bytes) -> None:
    """Check the length of a session key.

    Raises:
        ConfigError: the key is too short.
    """
    if len(secret) < MIN_KEY_BYTES:
        raise ConfigError(
            f"a session key needs at least {MIN_KEY_BYTES} bytes, got {len(secret)};"
            " make one with: openssl rand -hex 32"
        )


def find_server_id(session_id: str) -> str:
    """Return the server id in a signed session id that was not verified; "" if it has none."""
    parts = session_id.split("~", 2)
    return parts[1] if len(parts) == 3 else ""


def _make_signature(server_key: str, unsigned_id: str) -> str:
    digest = hmac.digest(server_key.encode(), unsigned_id.encode(), "sha256")
    return base64.urlsafe_b64encode(digest[:16]).decode().rstrip("=")


def _make_signature_error() -> AuthenticationError:
    return AuthenticationError("the session id is not signed by this fleet; open a session")


def make_tools_only_error() -> PermissionDeniedError:
    """Build the error of a call that needs the full session id but has a tools id."""
    return PermissionDeniedError(
        "the session id may only call tools; this call needs the id that the client got when it"
        " opened the session"
    )


@contextlib.contextmanager
def hide_full_id(full_id: str, caller_id: str) -> Iterator[None]:
    """Replace the full session id by the caller's id in the messages of errors raised inside."""
    try:
        yield
    except EnvError as error:
        if full_id == caller_id or full_id not in error.message:
            raise
        message = error.message.replace(full_id, caller_id)
        raise make_wire_error(error.code, message, error.retry_after_s) from None


class SessionIdIssuer:
    """Chooses the ids under which a server opens sessions.

    Args:
        server_id: the server that signed ids must name.
        key: key of signed ids; None refuses ids chosen by clients.
    """

    def __init__(self, server_id: str, key: SessionKey | None) -> None:
        self._server_id = server_id
        self._key = key
        self._used_at_s: OrderedDict[str, float] = OrderedDict()

    def choose(self, requested_id: str) -> str:
        """Return the requested id, which can be used once, or a new id if it is empty.

        Raises:
            AuthenticationError: the id is not signed with this server's key.
            SessionLostError: the id is for another server, too old, or already used.
        """
        if not requested_id:
            return secrets.token_urlsafe(18)
        if self._key is None:
            raise AuthenticationError(
                "an open cannot name a session id because this server has no session key; start"
                " the server with the gateway's session key, or a server key derived from it"
            )
        if find_server_id(requested_id) not in ("", self._server_id):
            raise _make_used_error()  # only a gateway can verify ids of other servers
        signed_id = self._key.read(requested_id)
        if signed_id.is_tools_only:
            raise make_tools_only_error()
        now_s = time.time()
        oldest_s = now_s - MAX_OPEN_DELAY_S
        while (
            self._used_at_s and next(iter(self._used_at_s.values())) < oldest_s - MAX_OPEN_DELAY_S
        ):
            self._used_at_s.popitem(last=False)
        if signed_id.issued_s < oldest_s:
            raise SessionLostError(
                f"the session id was issued {now_s - signed_id.issued_s:.0f} s ago by this server's"
                f" clock, more than {MAX_OPEN_DELAY_S:g} s; ask the gateway for a new one, and"
                " check that the clocks of gateway and server agree"
            )
        if signed_id.server_id != self._server_id or requested_id in self._used_at_s:
            raise _make_used_error()
        self._used_at_s[requested_id] = now_s
        return requested_id


def _make_used_error() -> SessionLostError:
    return SessionLostError(
        "the session id was already used, or belongs to another server; ask the gateway for a new"
        " one"
    )


def make_pod_server_id(pod_uid: str) -> str:
    """Return the name of a pod's server in session ids: the pod's uid without dashes.

    A gateway reads the uid from the cluster's EndpointSlices and the pod reads its own from
    POD_UID (downward API, `metadata.uid`), so both know the name without a call.

    Raises:
        ConfigError: the uid is not valid.
    """
    server_id = pod_uid.replace("-", "").lower()
    if not server_id or not _NAME_PATTERN.fullmatch(server_id):
        raise ConfigError(
            f"{pod_uid!r} is not a pod's uid, such as 8c5f7a3e-0b1d-4c7e-9a55-2f7d1c0e4b6a;"
            " set POD_UID from metadata.uid through the downward API"
        )
    return server_id
