"""Values, their schema and their page know the same names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml
from chart_docs import VALUES, find_value, read_keys

from tests.charts.rendering import CHART

Json = dict[str, Any]


def paths(schema: Json, root: Json, above: str = "") -> Iterator[str]:
    """The names of all values that the schema lets through."""
    for part in (schema, *schema.get("allOf", ())):
        if "$ref" in part:
            yield from paths(root["definitions"][part["$ref"].rpartition("/")[2]], root, above)
        for name, below in part.get("properties", {}).items():
            yield f"{above}{name}"
            yield from paths(below, root, f"{above}{name}.")


def test_the_schema_knows_no_value_that_has_no_default_and_no_comment() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    text = VALUES.read_text(encoding="utf-8")
    # Helm itself gives every chart a `global`.
    known = {".".join(one.path) for one in read_keys(text)} | {"global"}
    whole = ("resources.", "affinity.", "environments.")
    for path in paths(schema, schema):
        assert path in known or any(one in f"{path}." for one in whole), path


def test_the_schema_is_closed() -> None:
    text = (CHART / "values.schema.json").read_text(encoding="utf-8")
    open_ones = [one for one in _objects(json.loads(text)) if "additionalProperties" not in one]
    # Parts of pods and policies, and options of environments, which Kubernetes and the
    # environment check themselves.
    assert all("properties" not in one for one in open_ones)


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
    text = VALUES.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    for one in read_keys(text):
        find_value(values, one.path)
        assert one.comment.endswith("."), one.path
        assert len(one.comment) > 5, one.path
