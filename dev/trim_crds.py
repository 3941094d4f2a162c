"""Write the schemas of custom resources for the chart's tests.

    folder of CustomResourceDefinitions --> tests/charts/crds/KIND.json

A definition consists mostly of prose and copies of a pod's schema. The result contains only the
fields of the stored version with their types and rules, and a reference to Kubernetes' schema for
each pod specification.

    python dev/trim_crds.py FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

SCHEMAS_FOLDER = Path(__file__).parents[1] / "tests" / "charts" / "crds"
POD_SPEC = {"$ref": "https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.api.core.v1.PodSpec"}
_OMITTED_KEYS = (
    *("description", "title", "example", "externalDocs"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"),
)


def trim(schema: Any) -> Any:
    """Return the schema without prose and with references for pods."""
    if isinstance(schema, list):
        return [trim(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    fields = schema.get("properties")
    if isinstance(fields, dict):
        if {"containers", "volumes", "nodeSelector"} <= fields.keys():
            return POD_SPEC
        outer = {key: value for key, value in schema.items() if key != "properties"}
        return {**trim(outer), "properties": {name: trim(fields[name]) for name in fields}}
    return {key: trim(value) for key, value in schema.items() if key not in _OMITTED_KEYS}


def make_schema(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a definition that the tests need."""
    spec = definition["spec"]
    stored_version = next(version for version in spec["versions"] if version.get("storage"))
    schema = trim(stored_version["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    version = f"{spec['group']}/{stored_version['name']}"
    return {"apiVersion": version, "kind": spec["names"]["kind"], "schema": schema}


def main() -> None:
    """Write a file for each definition in the folder."""
    parser = argparse.ArgumentParser(description="Write the schemas of custom resources.")
    parser.add_argument(
        "folder", type=Path, help="folder of YAML files with CustomResourceDefinitions"
    )
    for path in sorted(parser.parse_args().folder.glob("*.yaml")):
        for definition in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            result = make_schema(definition)
            text = json.dumps(result, separators=(",", ":"), sort_keys=True)
            (SCHEMAS_FOLDER / f"{result['kind']}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
