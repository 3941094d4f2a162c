"""The environments of a gateway by name."""

from __future__ import annotations

from ludus.env.messages.protobuf import ENVIRONMENT_KEY
from ludus.proto.errors import InvalidCallError
from ludus.services.gateway.sessions.sessions import GatewaySessions


class UnknownEnvironmentError(InvalidCallError):
    """The gateway does not serve the requested environment."""


class Environments(dict[str, GatewaySessions]):
    """The sessions of every environment of a gateway, by the environment's name."""

    @property
    def is_ready(self) -> bool:
        """True when every source has published its first list of servers."""
        return all(sessions.fleet.has_server_list for sessions in self.values())

    @property
    def is_draining(self) -> bool:
        """True once the gateway refuses new sessions."""
        return any(sessions.admission.is_draining for sessions in self.values())

    @property
    def num_sessions(self) -> int:
        """Number of open sessions that were opened through this gateway."""
        return sum(len(sessions.tracked_sessions) for sessions in self.values())

    def find(self, name: str) -> GatewaySessions:
        """Return the sessions of an environment; an empty name selects the only environment.

        Raises:
            UnknownEnvironmentError: the name is unknown, or it is empty and there are several
                environments.
        """
        if not name and len(self) == 1:
            return next(iter(self.values()))
        if name not in self:
            shown_name = f"'{name}'" if name else "no name"
            raise UnknownEnvironmentError(
                f"expected one of the environments {', '.join(sorted(self)) or '(none)'}, got"
                f" {shown_name}; over gRPC set it in the metadata {ENVIRONMENT_KEY}"
            )
        return self[name]

    def drain(self) -> None:
        """Refuse new sessions from now on; existing sessions continue."""
        for sessions in self.values():
            sessions.drain()
