"""Object store of the fake API server, with revisions, a history and update rules."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]

_REASON_BY_STATUS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound",
    405: "MethodNotAllowed", 409: "Conflict", 410: "Expired", 415: "UnsupportedMediaType",
    429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """The object or list that a request addresses."""

    api_version: str
    plural: str
    namespace: str
    name: str
    subresource: str = ""

    @property
    def kind(self) -> tuple[str, str]:
        return self.api_version, self.plural


@dataclass(frozen=True)
class Selection:
    """The namespace and equality selectors of a list or watch."""

    namespace: str
    labels: tuple[tuple[str, str | None], ...]
    fields: tuple[tuple[str, str | None], ...]

    def __contains__(self, json_object: Json | None) -> bool:
        if json_object is None:
            return False
        metadata = json_object["metadata"]
        labels = metadata.get("labels", {})
        return (
            self.namespace in ("", metadata["namespace"])
            and all(_get_field(json_object, path) == value for path, value in self.fields)
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
    old_object: Json | None
    new_object: Json | None

    def make_line(self, selection: Selection) -> bytes | None:
        """Return the watch event for a selection, or None if neither object is selected."""
        was_selected, is_selected = self.old_object in selection, self.new_object in selection
        if not was_selected and not is_selected:
            return None
        if was_selected and is_selected:
            event_type = "MODIFIED"
        else:
            event_type = "ADDED" if is_selected else "DELETED"
        event_object = copy.deepcopy(self.new_object if is_selected else self.old_object)
        event_object["metadata"]["resourceVersion"] = str(self.revision)
        return make_event(event_type, event_object)


class StatusError(Exception):
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
            "reason": reason or _REASON_BY_STATUS.get(status, "Unknown"),
            "code": status,
        }


class ObjectStore:
    """Objects by kind, namespace and name. `on_change` is called with each change."""

    def __init__(self, revision: int, on_change: Callable[[Change], None]) -> None:
        self.revision = revision
        self.oldest_revision = revision
        """Oldest revision from which a watch can start."""
        self._on_change = on_change
        self._objects: dict[tuple[str, str], dict[tuple[str, str], Json]] = {}
        self._history: list[Change] = []

    def compact(self) -> None:
        self.oldest_revision = self.revision
        self._history.clear()

    def list_backlog(self, target: Target, version: str, selection: Selection) -> Iterator[bytes]:
        """Yield the events that a watch from the version receives immediately."""
        if version in ("", "0"):
            yield from (
                make_event("ADDED", json_object)
                for json_object in self.list_objects(target)
                if json_object in selection
            )
            return
        for change in self._history:
            if change.revision > int(version) and change.kind == target.kind:
                line = change.make_line(selection)
                if line is not None:
                    yield line

    def list_objects(self, target: Target) -> list[Json]:
        return list(self._objects.get(target.kind, {}).values())

    def find(self, target: Target) -> Json | None:
        return self._objects.get(target.kind, {}).get((target.namespace, target.name))

    def require(self, target: Target) -> Json:
        existing_object = self.find(target)
        if existing_object is None:
            raise StatusError(404, f'{target.plural} "{target.name}" not found')
        return existing_object

    def change(self, target: Target, old_object: Json, update: Json) -> Json:
        """Apply a client's update to the status, or to everything except the status."""
        version = update["metadata"].get("resourceVersion")
        if version not in (None, "", old_object["metadata"]["resourceVersion"]):
            raise StatusError(
                409,
                f'Operation cannot be fulfilled on {target.plural} "{target.name}": the object'
                " has been modified; please apply your changes to the latest version",
            )
        if (
            update["metadata"].get("uid", old_object["metadata"]["uid"])
            != old_object["metadata"]["uid"]
        ):
            raise StatusError(409, "the uid of an object is immutable")
        spec_source, status_source = (
            (old_object, update) if target.subresource == "status" else (update, old_object)
        )
        new_object = {**copy.deepcopy(spec_source)}
        new_object.pop("status", None)
        if "status" in status_source:
            new_object["status"] = copy.deepcopy(status_source["status"])
        deletion_time = old_object["metadata"].get("deletionTimestamp")
        if deletion_time and not new_object["metadata"].get("finalizers"):
            self.store(target, old_object, None)
            return new_object
        return self.store(target, old_object, new_object)

    def store(self, target: Target, old_object: Json | None, new_object: Json | None) -> Json:
        """Store an object, or remove it if `new_object` is None; return a copy of `new_object`."""
        self.revision += 1
        objects = self._objects.setdefault(target.kind, {})
        if new_object is None:
            objects.pop((target.namespace, target.name))
        else:
            new_object = copy.deepcopy(new_object)
            old_metadata = (
                old_object["metadata"]
                if old_object
                else {"uid": str(uuid.uuid4()), "generation": 0}
            )
            is_new_spec = old_object is None or old_object.get("spec") != new_object.get("spec")
            metadata = new_object["metadata"]
            metadata["namespace"] = target.namespace
            metadata.setdefault("uid", old_metadata["uid"])
            metadata["creationTimestamp"] = old_metadata.get(
                "creationTimestamp", get_current_time()
            )
            metadata["generation"] = old_metadata["generation"] + is_new_spec
            metadata["resourceVersion"] = str(self.revision)
            if "deletionTimestamp" in old_metadata:
                metadata["deletionTimestamp"] = old_metadata["deletionTimestamp"]
            objects[target.namespace, target.name] = new_object
        change = Change(self.revision, target.kind, old_object, new_object)
        self._history.append(change)
        self._on_change(change)
        return copy.deepcopy(new_object) if new_object is not None else {}


def _get_field(node: Any, path: str) -> Any:
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def make_event(event_type: str, json_object: Json) -> bytes:
    """Return an event as a line of a watch stream."""
    return json.dumps({"type": event_type, "object": json_object}).encode() + b"\n"


def merge_patch(document: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    patched_document = copy.deepcopy(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            patched_document.pop(key, None)
        else:
            patched_document[key] = merge_patch(patched_document.get(key), value)
    return patched_document


def make_too_old_error() -> StatusError:
    return StatusError(410, "too old resource version", "Expired")


def get_current_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
