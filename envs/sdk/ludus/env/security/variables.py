"""The environment variables that hold secrets: arguments are shown to every user of a machine."""

from __future__ import annotations

TOKEN_VARIABLE = "LUDUS_ENV_TOKEN"
"""The token that a server asks for."""
SESSION_KEY_VARIABLE = "LUDUS_SESSION_KEY"
"""The key by which servers and gateways sign session ids."""
