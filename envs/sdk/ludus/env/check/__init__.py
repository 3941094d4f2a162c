"""Checks of the contract of environments and servers."""

from ludus.env.check.check import (
    CheckReport,
    EnvironmentCheckError,
    check_environment,
    check_server,
)

__all__ = ["CheckReport", "EnvironmentCheckError", "check_environment", "check_server"]
