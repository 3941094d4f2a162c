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
    """The object or list of a request."""

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
    """The namespace and equality selectors of a list or watch."""

    namespace: str
    labels: tuple[tuple[str, str | None], ...]
    fields: tuple[tuple[str, str | None], ...]

    def __contains__(self, target_object: Json | None) -> bool:
        if target_object is None:
            return False
        metadata = target_object["metadata"]
        labels = metadata.get("labels", {})
        return (
            self.namespace in ("", metadata["namespace"])
            and all(_field(target_object, path) == value for path, value in self.fields)
            and all(
                key in labels if value is None else labels.get(key) == value
                for key, value in self.labels
            )
        )


@dataclass(frozen=True)
class Change:
    """A change in the history."""

    revision: int
    kind: tuple[str, str]
    previous: Json | None
    updated: Json | None

    def line(self, selects: Selection) -> bytes | None:
        """Return the event for a watch with this selection."""
        was, now = self.previous in selects, self.updated in selects
        if not was and not now:
            return None
        kind = "MODIFIED" if was and now else "ADDED" if now else "DELETED"
        target_object = copy.deepcopy(self.updated if now else self.previous)
        target_object["metadata"]["resourceVersion"] = str(self.revision)
        return event(kind, target_object)


class Refused(Exception):
    """An error that is sent as a Status object."""

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
    """Objects of any kind by path; `on_change` is called with each change."""

    def __init__(self, revision: int, on_change: Callable[[Change], None]) -> None:
        self.revision = revision
        self.oldest = revision
        """Oldest version from which a watch can start."""
        self._on_change = on_change
        self._objects: dict[tuple[str, str], dict[tuple[str, str], Json]] = {}
        self._history: list[Change] = []

    def compact(self) -> None:
        self.oldest = self.revision
        self._history.clear()

    def backlog(self, target: Target, version: str, selects: Selection) -> Iterator[bytes]:
        """Return the events that a watch from a version receives immediately."""
        if version in ("", "0"):
            yield from (
                event("ADDED", stored) for stored in self.list_objects(target) if stored in selects
            )
            return
        for change in self._history:
            if change.revision > int(version) and change.kind == target.kind:
                line = change.line(selects)
                if line is not None:
                    yield line

    def list_objects(self, target: Target) -> list[Json]:
        return list(self._objects.get(target.kind, {}).values())

    def find(self, target: Target) -> Json | None:
        return self._objects.get(target.kind, {}).get((target.namespace, target.name))

    def require(self, target: Target) -> Json:
        target_object = self.find(target)
        if target_object is None:
            raise Refused(404, f'{target.plural} "{target.name}" not found')
        return target_object

    def change(self, target: Target, previous: Json, update: Json) -> Json:
        """Store a client's update of the status, or of everything except the status."""
        version = update["metadata"].get("resourceVersion")
        if version not in (None, "", previous["metadata"]["resourceVersion"]):
            raise Refused(
                409,
                f'Operation cannot be fulfilled on {target.plural} "{target.name}": the object'
                " has been modified; please apply your changes to the latest version",
            )
        if (
            update["metadata"].get("uid", previous["metadata"]["uid"])
            != previous["metadata"]["uid"]
        ):
            raise Refused(409, "the uid of an object does not change")
        source, kept = (previous, update) if target.part == "status" else (update, previous)
        updated = {**copy.deepcopy(source)}
        updated.pop("status", None)
        if "status" in kept:
            updated["status"] = copy.deepcopy(kept["status"])
        is_doomed = previous["metadata"].get("deletionTimestamp")
        if is_doomed and not updated["metadata"].get("finalizers"):
            self.store(target, previous, None)
            return updated
        return self.store(target, previous, updated)

    def store(self, target: Target, previous: Json | None, updated: Json | None) -> Json:
        """Store an object (None removes it), notify the watches and return a copy."""
        self.revision += 1
        objects = self._objects.setdefault(target.kind, {})
        if updated is None:
            objects.pop((target.namespace, target.name))
        else:
            updated = copy.deepcopy(updated)
            old = previous["metadata"] if previous else {"uid": str(uuid.uuid4()), "generation": 0}
            is_new_spec = previous is None or previous.get("spec") != updated.get("spec")
            metadata = updated["metadata"]
            metadata["namespace"] = target.namespace
            metadata.setdefault("uid", old["uid"])
            metadata["creationTimestamp"] = old.get("creationTimestamp", now())
            metadata["generation"] = old["generation"] + is_new_spec
            metadata["resourceVersion"] = str(self.revision)
            if "deletionTimestamp" in old:
                metadata["deletionTimestamp"] = old["deletionTimestamp"]
            objects[target.namespace, target.name] = updated
        change = Change(self.revision, target.kind, previous, updated)
        self._history.append(change)
        self._on_change(change)
        return copy.deepcopy(updated) if updated is not None else {}


def _field(target_object: Any, path: str) -> Any:
    for part in path.split("."):
        target_object = target_object.get(part) if isinstance(target_object, dict) else None
    return target_object


def event(kind: str, target_object: Json) -> bytes:
    """Build a line of a watch."""
    return json.dumps({"type": kind, "object": target_object}).encode() + b"\n"


def merge_patch(target_object: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = copy.deepcopy(target_object) if isinstance(target_object, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def too_old() -> Refused:
    return Refused(410, "too old resource version", "Expired")


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
