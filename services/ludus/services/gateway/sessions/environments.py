"""The environments of a gateway by name."""

from __future__ import annotations

from collections.abc import Mapping

from ludus.env.messages.protobuf import ENVIRONMENT_KEY
from ludus.proto.errors import InvalidCallError
from ludus.services.gateway.sessions.sessions import GatewaySessions


class UnknownEnvironmentError(InvalidCallError):
    """The gateway serves no environment of that name."""


def find_environment(environments: Mapping[str, GatewaySessions], name: str) -> GatewaySessions:
    """Return the sessions of the named environment; an empty name selects the only environment.

    Raises:
        UnknownEnvironmentError: the name is unknown, or it is empty and there are several.
    """
    if not name and len(environments) == 1:
        return next(iter(environments.values()))
    sessions = environments.get(name)
    if sessions is None:
        shown_name = f"'{name}'" if name else "no name"
        raise UnknownEnvironmentError(
            f"expected one of the environments {', '.join(sorted(environments)) or '(none)'},"
            f" got {shown_name}; over gRPC set it in the metadata {ENVIRONMENT_KEY}"
        )
    return sessions
