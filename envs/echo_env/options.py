"""Options of the echo environment."""

from __future__ import annotations

from ludus.env.options import EnvironmentOptions


class EchoOptions(EnvironmentOptions):
    """The echo environment has no options."""
