"""Names of the environment variables that contain secrets, which must not be arguments."""

from __future__ import annotations

TOKEN_VARIABLE = "LUDUS_ENV_TOKEN"
"""Token that clients must send to a server."""
SESSION_KEY_VARIABLE = "LUDUS_SESSION_KEY"
"""Key with which gateways and servers sign session ids."""
