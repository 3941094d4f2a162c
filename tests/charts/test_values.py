"""Values, their schema and their page contain the same names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml
from chart_docs import VALUES_FILE, find_value, read_keys

from tests.charts.rendering import CHART

Json = dict[str, Any]


def paths(schema: Json, root: Json, above: str = "") -> Iterator[str]:
    """Yield the names of all values that the schema accepts."""
    for part in (schema, *schema.get("allOf", ())):
        if "$ref" in part:
            yield from paths(root["definitions"][part["$ref"].rpartition("/")[2]], root, above)
        for name, below in part.get("properties", {}).items():
            yield f"{above}{name}"
            yield from paths(below, root, f"{above}{name}.")


def test_every_value_of_the_schema_has_a_default_and_a_comment() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    text = VALUES_FILE.read_text(encoding="utf-8")
    # Helm itself adds `global` to every chart.
    documented = {".".join(key.path) for key in read_keys(text)} | {"global"}
    free_form_prefixes = ("resources.", "affinity.", "environments.")
    for path in paths(schema, schema):
        assert path in documented or any(prefix in f"{path}." for prefix in free_form_prefixes), (
            path
        )


def test_the_schema_is_closed() -> None:
    text = (CHART / "values.schema.json").read_text(encoding="utf-8")
    open_schemas = [
        part for part in _objects(json.loads(text)) if "additionalProperties" not in part
    ]
    # Kubernetes validates parts of pods and policies; environments validate their options.
    assert all("properties" not in part for part in open_schemas)


def _objects(schema: Any) -> Iterator[Json]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for below in schema.values():
            yield from _objects(below)
    elif isinstance(schema, list):
        for below in schema:
            yield from _objects(below)


def test_every_comment_is_a_sentence_about_a_value() -> None:
    text = VALUES_FILE.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    for key in read_keys(text):
        find_value(values, key.path)
        assert key.comment.endswith("."), key.path
        assert len(key.comment) > 5, key.path
