"""The tokens that a server accepts.

The command line imports this file to print its help, so it must not import large modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Iterator

from ludus.env.security.secret_files import ReadSecrets

MISSING_TOKEN = (
    "expected `authorization: Bearer <token>` with this server's token;"
    " pass token=... to the client"
)
REVOKED_TOKEN = "this server's token was replaced; connect again with the new token"


def is_authorized(authorization: str | bytes, token: str) -> bool:
    """Return True if an `authorization` value contains the token, in constant time."""
    authorization_bytes = (
        authorization if isinstance(authorization, bytes) else authorization.encode()
    )
    return hmac.compare_digest(authorization_bytes, f"Bearer {token}".encode())


class AcceptedTokens:
    """The tokens that a server accepts, and the connections that were opened with them.

    Args:
        read_tokens: returns the current tokens.
    """

    def __init__(self, read_tokens: ReadSecrets) -> None:
        self._read_tokens = read_tokens
        self._open_connections: dict[Callable[[], None], str | bytes] = {}
        """`authorization` value of each open connection, by the function that closes it."""

    def is_authorized(self, authorization: str | bytes) -> bool:
        """Return True if an `authorization` value contains a current token."""
        return any([is_authorized(authorization, token) for token in self._read_tokens()])

    @contextlib.contextmanager
    def track_connection(
        self, authorization: str | bytes, close: Callable[[], None]
    ) -> Iterator[None]:
        """Track a connection while the context is active.

        Args:
            close: called once, if the token is no longer accepted.
        """
        self._open_connections[close] = authorization
        try:
            yield
        finally:
            self._open_connections.pop(close, None)

    def close_refused_connections(self) -> None:
        """Close the connections whose tokens are no longer accepted."""
        for close, authorization in list(self._open_connections.items()):
            if not self.is_authorized(authorization):
                del self._open_connections[close]
                close()

    async def close_refused_connections_forever(self, interval_s: float) -> None:
        """Call `close_refused_connections` at intervals, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.close_refused_connections()
