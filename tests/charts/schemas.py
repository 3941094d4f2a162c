"""Objects against the schemas that an API server holds them to.

    built-in kinds    kubernetes-validate, strict     --+
    custom resources  crds/KIND.json, strict, and CEL --+--> problems(): a line for each mistake

The files in crds/ come from KubeRay 1.7.0, KEDA 2.20.2, agent-sandbox 0.5.6, the Gateway API 1.6.1
and the Prometheus operator 0.93; `dev/trim_crds.py` writes them. An API server drops fields that
it does not know without a word, so they count as mistakes here.
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
"""The oldest Kubernetes that the chart takes, the one of the cluster tests, the newest known."""
_RESERVED = frozenset({"namespace", "package", "for", "if", "in", "var", "function", "import"})


def problems(found: dict[str, Any], version: str) -> list[str]:
    """What an API server of that version would not take, or would leave out."""
    custom = _custom(found["kind"], found["apiVersion"])
    if custom is None:
        return _said(_built_in(version, found["kind"], found["apiVersion"]), found)
    validator = Draft202012Validator(_strict(custom), registry=_registry(version))
    return _said(validator, found) + list(_broken_rules(custom, _complete(custom, found), ""))


def _said(validator: Draft202012Validator, found: dict[str, Any]) -> list[str]:
    said = []
    for error in validator.iter_errors(found):
        first = best_match([error])
        place = "/".join(map(str, first.absolute_path))
        said.append(f"{found['kind']}/{found['metadata']['name']} {place}: {first.message[:300]}")
    return said


@functools.cache
def _registry(version: str) -> Registry:
    definitions = kubernetes.schema_contents(_file(version, "_definitions"), version)
    return Resource.from_contents(definitions) @ Registry()


@functools.cache
def _built_in(version: str, kind: str, api_version: str) -> Draft202012Validator:
    group, _, name = api_version.rpartition("/")
    short = f"{group.partition('.')[0]}-{name}" if group else name
    schema = kubernetes.schema_contents(_file(version, f"{kind.lower()}-{short}"), version)
    return Draft202012Validator(schema, registry=_registry(version))


def _file(version: str, name: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict/{name}.json"


@functools.cache
def _custom(kind: str, api_version: str) -> dict[str, Any] | None:
    path = CRDS / f"{kind}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    assert found["apiVersion"] == api_version, f"{kind} is of {found['apiVersion']}"
    return found["schema"]  # type: ignore[no-any-return]


def _strict(schema: Any, at_root: bool = True) -> Any:
    """The schema that refuses what an API server would drop."""
    if isinstance(schema, list):
        return [_strict(one, False) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(one, False) for key, one in schema.items() if key != "properties"}
    fields = schema.get("properties")
    if isinstance(fields, dict):
        made["properties"] = {name: _strict(one, False) for name, one in fields.items()}
        is_open = schema.get("x-kubernetes-preserve-unknown-fields")
        if not is_open and "additionalProperties" not in schema:
            made["additionalProperties"] = False
    return made


def _complete(schema: Any, value: Any) -> Any:
    """The value with its defaults, as rules see it."""
    if isinstance(value, list):
        return [_complete(schema.get("items", {}), one) for one in value]
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties", {})
    missing = {
        name: one["default"]
        for name, one in fields.items()
        if "default" in one and name not in value
    }
    present = {name: _complete(fields.get(name, {}), one) for name, one in value.items()}
    return present | missing


def _broken_rules(schema: Any, value: Any, place: str) -> Iterator[str]:
    """The CEL rules of a custom resource that do not hold for the value."""
    for rule in schema.get("x-kubernetes-validations", ()):
        # Rules about a change need the object as it was.
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            yield f"{place}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        for name, below in schema.get("properties", {}).items():
            if name in value:
                yield from _broken_rules(below, value[name], f"{place}/{name}")
        every = schema.get("additionalProperties")
        for name, below in value.items() if isinstance(every, dict) else ():
            yield from _broken_rules(every, below, f"{place}/{name}")
    if isinstance(value, list) and "items" in schema:
        for index, below in enumerate(value):
            yield from _broken_rules(schema["items"], below, f"{place}/{index}")


def _holds(rule: str, value: Any) -> bool:
    return bool(_program(rule).evaluate({"self": json_to_cel(_escaped(value))}))


@functools.cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _escaped(value: Any) -> Any:
    """Fields under the names by which rules know them: CEL's own words between underscores."""
    if isinstance(value, dict):
        return {
            f"__{key}__" if key in _RESERVED else key: _escaped(one) for key, one in value.items()
        }
    return [_escaped(one) for one in value] if isinstance(value, list) else value
