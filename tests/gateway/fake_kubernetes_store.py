"""The objects of the fake API server: one revision, a history, and the rules of updates."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]

_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound",
    405: "MethodNotAllowed", 409: "Conflict", 410: "Expired", 415: "UnsupportedMediaType",
    429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What a request is about."""

    api_version: str
    plural: str
    namespace: str
    name: str
    part: str = ""

    @property
    def kind(self) -> tuple[str, str]:
        return self.api_version, self.plural


@dataclass(frozen=True)
class Selection:
    """A namespace and equality selectors, as a list or a watch names them."""

    namespace: str
    labels: tuple[tuple[str, str | None], ...]
    fields: tuple[tuple[str, str | None], ...]

    def __contains__(self, found: Json | None) -> bool:
        if found is None:
            return False
        metadata = found["metadata"]
        labels = metadata.get("labels", {})
        return (
            self.namespace in ("", metadata["namespace"])
            and all(_field(found, path) == value for path, value in self.fields)
            and all(
                key in labels if value is None else labels.get(key) == value
                for key, value in self.labels
            )
        )


@dataclass(frozen=True)
class Change:
    """One entry of the history."""

    revision: int
    kind: tuple[str, str]
    before: Json | None
    after: Json | None

    def line(self, selects: Selection) -> bytes | None:
        """What a watch with this selection hears of it."""
        was, now = self.before in selects, self.after in selects
        if not was and not now:
            return None
        kind = "MODIFIED" if was and now else "ADDED" if now else "DELETED"
        found = copy.deepcopy(self.after if now else self.before)
        found["metadata"]["resourceVersion"] = str(self.revision)
        return event(kind, found)


class Refused(Exception):
    """Answered as a Status object."""

    def __init__(self, status: int, message: str, reason: str = "", retry_after: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"Retry-After": retry_after} if retry_after else {}
        self.body = {
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "message": message,
            "reason": reason or _REASONS.get(status, "Unknown"),
            "code": status,
        }


class ObjectStore:
    """Any kind of object, by path; `heard` is told each change as it is made."""

    def __init__(self, revision: int, heard: Callable[[Change], None]) -> None:
        self.revision = revision
        self.oldest = revision
        """From before this no watch can start."""
        self._heard = heard
        self._objects: dict[tuple[str, str], dict[tuple[str, str], Json]] = {}
        self._history: list[Change] = []

    def compact(self) -> None:
        self.oldest = self.revision
        self._history.clear()

    def backlog(self, target: Target, version: str, selects: Selection) -> Iterator[bytes]:
        """What a watch from a version hears at once."""
        if version in ("", "0"):
            yield from (event("ADDED", one) for one in self.all_of(target) if one in selects)
            return
        for change in self._history:
            if change.revision > int(version) and change.kind == target.kind:
                line = change.line(selects)
                if line is not None:
                    yield line

    def all_of(self, target: Target) -> list[Json]:
        return list(self._objects.get(target.kind, {}).values())

    def find(self, target: Target) -> Json | None:
        return self._objects.get(target.kind, {}).get((target.namespace, target.name))

    def require(self, target: Target) -> Json:
        found = self.find(target)
        if found is None:
            raise Refused(404, f'{target.plural} "{target.name}" not found')
        return found

    def change(self, target: Target, before: Json, wanted: Json) -> Json:
        """An update as a client may make it, which touches the status or all but the status."""
        version = wanted["metadata"].get("resourceVersion")
        if version not in (None, "", before["metadata"]["resourceVersion"]):
            raise Refused(
                409,
                f'Operation cannot be fulfilled on {target.plural} "{target.name}": the object'
                " has been modified; please apply your changes to the latest version",
            )
        if wanted["metadata"].get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]:
            raise Refused(409, "the uid of an object does not change")
        source, kept = (before, wanted) if target.part == "status" else (wanted, before)
        after = {**copy.deepcopy(source)}
        after.pop("status", None)
        if "status" in kept:
            after["status"] = copy.deepcopy(kept["status"])
        is_doomed = before["metadata"].get("deletionTimestamp")
        if is_doomed and not after["metadata"].get("finalizers"):
            self.store(target, before, None)
            return after
        return self.store(target, before, after)

    def store(self, target: Target, before: Json | None, after: Json | None) -> Json:
        """Writes the object (None removes it) and tells the watches; answers a copy."""
        self.revision += 1
        of_kind = self._objects.setdefault(target.kind, {})
        if after is None:
            of_kind.pop((target.namespace, target.name))
        else:
            after = copy.deepcopy(after)
            old = before["metadata"] if before else {"uid": str(uuid.uuid4()), "generation": 0}
            is_new_spec = before is None or before.get("spec") != after.get("spec")
            metadata = after["metadata"]
            metadata["namespace"] = target.namespace
            metadata.setdefault("uid", old["uid"])
            metadata["creationTimestamp"] = old.get("creationTimestamp", now())
            metadata["generation"] = old["generation"] + is_new_spec
            metadata["resourceVersion"] = str(self.revision)
            if "deletionTimestamp" in old:
                metadata["deletionTimestamp"] = old["deletionTimestamp"]
            of_kind[target.namespace, target.name] = after
        change = Change(self.revision, target.kind, before, after)
        self._history.append(change)
        self._heard(change)
        return copy.deepcopy(after) if after is not None else {}


def _field(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def event(kind: str, found: Json) -> bytes:
    """A line of a watch."""
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


def merged(found: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7386) applied."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = copy.deepcopy(found) if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def too_old() -> Refused:
    return Refused(410, "too old resource version", "Expired")


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
