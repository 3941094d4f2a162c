"""The chart's values, their schema and their documentation contain the same names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml
from chart_docs import VALUES_FILE, find_value, read_keys

from tests.charts.rendering import CHART

Json = dict[str, Any]


def iterate_paths(schema: Json, root: Json, prefix: str = "") -> Iterator[str]:
    """Yield the names of all values that the schema accepts."""
    for subschema in (schema, *schema.get("allOf", ())):
        if "$ref" in subschema:
            yield from iterate_paths(
                root["definitions"][subschema["$ref"].rpartition("/")[2]], root, prefix
            )
        for name, nested_schema in subschema.get("properties", {}).items():
            yield f"{prefix}{name}"
            yield from iterate_paths(nested_schema, root, f"{prefix}{name}.")


def test_every_schema_value_is_listed_in_the_values_file() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    text = VALUES_FILE.read_text(encoding="utf-8")
    # Helm itself adds `global` to every chart.
    documented_paths = {".".join(key.path) for key in read_keys(text)} | {"global"}
    free_form_prefixes = ("resources.", "affinity.", "environments.")
    for path in iterate_paths(schema, schema):
        assert path in documented_paths or any(
            prefix in f"{path}." for prefix in free_form_prefixes
        ), path


def test_schema_forbids_unknown_properties() -> None:
    text = (CHART / "values.schema.json").read_text(encoding="utf-8")
    open_schemas = [
        subschema
        for subschema in _iterate_objects(json.loads(text))
        if "additionalProperties" not in subschema
    ]
    # Kubernetes validates parts of pods and policies; environments validate their options.
    assert all("properties" not in subschema for subschema in open_schemas)


def _iterate_objects(schema: Any) -> Iterator[Json]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for nested_schema in schema.values():
            yield from _iterate_objects(nested_schema)
    elif isinstance(schema, list):
        for nested_schema in schema:
            yield from _iterate_objects(nested_schema)


def test_every_comment_is_a_sentence_about_a_value() -> None:
    text = VALUES_FILE.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    for key in read_keys(text):
        find_value(values, key.path)
        assert key.comment.endswith("."), key.path
        assert len(key.comment) > 5, key.path
