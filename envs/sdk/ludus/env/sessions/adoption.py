"""Connections that call a session whose own connection has ended, and so become its owner.

connection ends --> orphan, lingers --called on another--> that one's own, until it ends too
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Protocol

from ludus.env.sessions.interface import Owner
from ludus.proto.env.v1 import env_pb2 as pb


class Adoptable(Protocol):
    """Sessions that may have orphans."""

    @property
    def orphans(self) -> Set[str]:
        """Those that outlived their connection; always the same set."""
        ...

    def adopt(self, session_id: str, owner: Owner) -> None:
        """Gives an orphan to its caller; other sessions stay whose they are."""
        ...


def adopt_called(sessions: Adoptable, calls: Iterable[pb.Call], owner: Owner) -> None:
    """Gives the orphans among the called sessions to the caller; ask for `orphans` before."""
    for call in calls:
        kind = call.WhichOneof("call")
        if kind not in (None, "open", "open_group"):
            sessions.adopt(getattr(call, kind).session_id, owner)
