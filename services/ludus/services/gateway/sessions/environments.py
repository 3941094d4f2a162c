"""The environments of a gateway by name."""

from __future__ import annotations

from collections.abc import Mapping

from ludus.env.messages.protobuf import ENVIRONMENT_KEY
from ludus.proto.errors import InvalidCallError
from ludus.services.gateway.sessions.sessions import GatewaySessions


class UnknownEnvironmentError(InvalidCallError):
    """No environment of that name is served here."""


def find_environment(environments: Mapping[str, GatewaySessions], name: str) -> GatewaySessions:
    """The sessions of the named environment; no name means the only one.

    Raises:
        UnknownEnvironmentError: there is none of that name, or several and no name.
    """
    if not name and len(environments) == 1:
        return next(iter(environments.values()))
    sessions = environments.get(name)
    if sessions is None:
        found = f"'{name}'" if name else "no name"
        raise UnknownEnvironmentError(
            f"expected one of the environments {', '.join(sorted(environments)) or '(none)'},"
            f" got {found}; over gRPC name it in the metadata {ENVIRONMENT_KEY}"
        )
    return sessions
