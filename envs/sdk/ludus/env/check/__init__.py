"""The contract of environments and servers as rules that anyone can run."""

from ludus.env.check.check import (
    CheckReport,
    EnvironmentCheckError,
    check_environment,
    check_server,
)

__all__ = ["CheckReport", "EnvironmentCheckError", "check_environment", "check_server"]
