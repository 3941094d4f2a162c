"""Validation of objects by the schemas that an API server uses.

    built-in kinds    kubernetes-validate, strict     --+
    custom resources  crds/KIND.json, strict, and CEL --+--> problems(): one line per mistake

The files in crds/ come from KubeRay 1.7.0, KEDA 2.20.2, agent-sandbox 0.5.6, the Gateway API 1.6.1
and the Prometheus operator 0.93; `dev/trim_crds.py` writes them. An API server silently drops
unknown fields, so they count as mistakes here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celpy
from celpy.adapter import json_to_cel
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from kubernetes_validate import utils as kubernetes
from referencing import Registry, Resource

CRDS = Path(__file__).parent / "crds"
VERSIONS = ("1.30", "1.34", "1.37")
"""Kubernetes versions: oldest supported, tested on a cluster, and newest with a schema."""
_RESERVED = frozenset({"namespace", "package", "for", "if", "in", "var", "function", "import"})


def problems(resource: dict[str, Any], version: str) -> list[str]:
    """Return a message for each field that an API server of this version refuses or drops."""
    custom_schema = _load_custom_schema(resource["kind"], resource["apiVersion"])
    if custom_schema is None:
        return _describe_errors(
            _load_built_in_validator(version, resource["kind"], resource["apiVersion"]), resource
        )
    validator = Draft202012Validator(_make_strict(custom_schema), registry=_load_registry(version))
    return _describe_errors(validator, resource) + list(
        _find_broken_rules(custom_schema, _add_defaults(custom_schema, resource), "")
    )


def _describe_errors(validator: Draft202012Validator, resource: dict[str, Any]) -> list[str]:
    messages = []
    for error in validator.iter_errors(resource):
        cause = best_match([error])
        path = "/".join(map(str, cause.absolute_path))
        messages.append(
            f"{resource['kind']}/{resource['metadata']['name']} {path}: {cause.message[:300]}"
        )
    return messages


@functools.cache
def _load_registry(version: str) -> Registry:
    definitions = kubernetes.schema_contents(_read_schema_file(version, "_definitions"), version)
    return Resource.from_contents(definitions) @ Registry()


@functools.cache
def _load_built_in_validator(version: str, kind: str, api_version: str) -> Draft202012Validator:
    group, _, name = api_version.rpartition("/")
    file_suffix = f"{group.partition('.')[0]}-{name}" if group else name
    schema = kubernetes.schema_contents(
        _read_schema_file(version, f"{kind.lower()}-{file_suffix}"), version
    )
    return Draft202012Validator(schema, registry=_load_registry(version))


def _read_schema_file(version: str, name: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict/{name}.json"


@functools.cache
def _load_custom_schema(kind: str, api_version: str) -> dict[str, Any] | None:
    path = CRDS / f"{kind}.json"
    if not path.exists():
        return None
    document = json.loads(path.read_text())
    assert document["apiVersion"] == api_version, (
        f"the schema of {kind} is for {document['apiVersion']}, got {api_version}"
    )
    return document["schema"]  # type: ignore[no-any-return]


def _make_strict(schema: Any, at_root: bool = True) -> Any:
    """Return the schema with an error for every field that an API server would drop."""
    if isinstance(schema, list):
        return [_make_strict(subschema, False) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    strict_schema = {
        key: _make_strict(subschema, False)
        for key, subschema in schema.items()
        if key != "properties"
    }
    fields = schema.get("properties")
    if isinstance(fields, dict):
        strict_schema["properties"] = {
            name: _make_strict(subschema, False) for name, subschema in fields.items()
        }
        is_open = schema.get("x-kubernetes-preserve-unknown-fields")
        if not is_open and "additionalProperties" not in schema:
            strict_schema["additionalProperties"] = False
    return strict_schema


def _add_defaults(schema: Any, value: Any) -> Any:
    """Return the value with the defaults of the schema, which CEL rules use."""
    if isinstance(value, list):
        return [_add_defaults(schema.get("items", {}), element) for element in value]
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties", {})
    defaults = {
        name: field["default"]
        for name, field in fields.items()
        if "default" in field and name not in value
    }
    completed_fields = {
        name: _add_defaults(fields.get(name, {}), element) for name, element in value.items()
    }
    return completed_fields | defaults


def _find_broken_rules(schema: Any, value: Any, location: str) -> Iterator[str]:
    """Yield a message for each CEL rule of a custom resource that the value violates."""
    for rule in schema.get("x-kubernetes-validations", ()):
        # Rules for updates need the previous object.
        if "oldSelf" not in rule["rule"] and not _is_satisfied(rule["rule"], value):
            yield f"{location}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        for name, nested_value in schema.get("properties", {}).items():
            if name in value:
                yield from _find_broken_rules(nested_value, value[name], f"{location}/{name}")
        item_schema = schema.get("additionalProperties")
        for name, nested_value in value.items() if isinstance(item_schema, dict) else ():
            yield from _find_broken_rules(item_schema, nested_value, f"{location}/{name}")
    if isinstance(value, list) and "items" in schema:
        for index, nested_value in enumerate(value):
            yield from _find_broken_rules(schema["items"], nested_value, f"{location}/{index}")


def _is_satisfied(rule: str, value: Any) -> bool:
    return bool(_compile_rule(rule).evaluate({"self": json_to_cel(_escape_names(value))}))


@functools.cache
def _compile_rule(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _escape_names(value: Any) -> Any:
    """Add underscores to field names that are reserved words of CEL."""
    if isinstance(value, dict):
        return {
            f"__{key}__" if key in _RESERVED else key: _escape_names(element)
            for key, element in value.items()
        }
    return [_escape_names(element) for element in value] if isinstance(value, list) else value
