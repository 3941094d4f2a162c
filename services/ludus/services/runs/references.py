"""Objects that the pods of a RayJob refer to: Secrets and volume claims."""

from __future__ import annotations

from collections.abc import Iterator

from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.manifest import pod_containers, pod_templates


def required_secrets(job: JsonObject) -> dict[str, set[str]]:
    """Return the names of the Secrets that the pods need to start, with the keys of each."""
    keys_by_secret: dict[str, set[str]] = {}
    for name, key in _secret_references(job):
        keys_by_secret.setdefault(name, set()).update({key} if key else ())
    return keys_by_secret


def required_claims(job: JsonObject) -> list[str]:
    """Return the names of the PersistentVolumeClaims that the pods mount."""
    names = {
        str(volume["persistentVolumeClaim"].get("claimName"))
        for template in pod_templates(job)
        for volume in (template.get("spec") or {}).get("volumes") or []
        if volume.get("persistentVolumeClaim")
    }
    return sorted(names)


def _secret_references(job: JsonObject) -> Iterator[tuple[str, str]]:
    for template in pod_templates(job):
        spec = template.get("spec") or {}
        for secret in spec.get("imagePullSecrets") or []:
            yield str(secret.get("name")), ""
        for volume in spec.get("volumes") or []:
            yield from _volume_references(volume)
        for container in [*pod_containers(template), *(spec.get("initContainers") or [])]:
            yield from _container_references(container)


def _volume_references(volume: JsonObject) -> Iterator[tuple[str, str]]:
    secret = volume.get("secret") or {}
    if secret and not secret.get("optional"):
        yield str(secret.get("secretName")), ""
        for item in secret.get("items") or []:
            yield str(secret.get("secretName")), str(item.get("key"))


def _container_references(container: JsonObject) -> Iterator[tuple[str, str]]:
    for variable in container.get("env") or []:
        reference = (variable.get("valueFrom") or {}).get("secretKeyRef") or {}
        if reference and not reference.get("optional"):
            yield str(reference.get("name")), str(reference.get("key"))
    for source in container.get("envFrom") or []:
        reference = source.get("secretRef") or {}
        if reference and not reference.get("optional"):
            yield str(reference.get("name")), ""
