"""Writes the schemas of custom resources that the chart's tests check against.

    folder of CustomResourceDefinitions --> tests/charts/crds/KIND.json

A definition is mostly prose and copies of a pod's schema. Left are the fields of its stored
version, their types and their rules; where a pod's specification stands, a reference to the one
of Kubernetes itself.

    python dev/trim_crds.py FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parents[1] / "tests" / "charts" / "crds"
POD = {"$ref": "https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.api.core.v1.PodSpec"}
_PROSE = ("description", "title", "example", "externalDocs")
_LISTS = ("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type")


def trimmed(schema: Any) -> Any:
    """The schema without prose, with references for pods."""
    if isinstance(schema, list):
        return [trimmed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    fields = schema.get("properties")
    if isinstance(fields, dict):
        if {"containers", "volumes", "nodeSelector"} <= fields.keys():
            return POD
        rest = {key: one for key, one in schema.items() if key != "properties"}
        return {**trimmed(rest), "properties": {name: trimmed(fields[name]) for name in fields}}
    return {key: trimmed(one) for key, one in schema.items() if key not in (*_PROSE, *_LISTS)}


def resource(definition: dict[str, Any]) -> dict[str, Any]:
    """What the tests have to know of one definition."""
    spec = definition["spec"]
    stored = next(one for one in spec["versions"] if one.get("storage"))
    schema = trimmed(stored["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    version = f"{spec['group']}/{stored['name']}"
    return {"apiVersion": version, "kind": spec["names"]["kind"], "schema": schema}


def main() -> None:
    """Write a file for each definition in the folder."""
    parser = argparse.ArgumentParser(description="Writes the schemas of custom resources.")
    parser.add_argument("folder", type=Path, help="with CustomResourceDefinitions as YAML files")
    for path in sorted(parser.parse_args().folder.glob("*.yaml")):
        for definition in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            found = resource(definition)
            text = json.dumps(found, separators=(",", ":"), sort_keys=True)
            (SCHEMAS / f"{found['kind']}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
