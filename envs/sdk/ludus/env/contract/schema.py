"""Random values that fit a JSON schema, and what is wrong with values that do not.

Covers what pydantic and OpenEnv's models write: types, bounds, enums, references, unions,
nested objects and arrays. Keywords beyond these are neither obeyed nor checked.
"""

from __future__ import annotations

import random
import string
from typing import Any

from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

_DEFAULT_REACH = 8
"""How far numbers without bounds go, and how long lists and texts without bounds get."""
_MAX_DEPTH = 12
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def random_value(schema: JsonObject, generator: random.Random) -> Any:
    """A value that fits; of an object, the required fields alone.

    Raises:
        ConfigError: the schema nests without an end.
    """
    return _draw(schema, schema, generator, 0)


def random_action(
    schema: JsonObject, observation: JsonObject, generator: random.Random
) -> JsonObject:
    """An action for the observation: out of its `legal_actions` where it lists them."""
    action = random_value(schema, generator)
    if not isinstance(action, dict):
        raise ConfigError(f"expected an action schema of an object, got {schema}")
    legal_actions = observation.get("legal_actions")
    required = schema.get("required", [])
    if isinstance(legal_actions, list) and legal_actions and len(required) == 1:
        action[required[0]] = generator.choice(legal_actions)
    return action


def fault_of(value: Any, schema: JsonObject) -> str:
    """What is wrong with the value, with the place; empty when it fits."""
    return _fault(value, schema, schema, "")


def _draw(schema: JsonObject, root: JsonObject, generator: random.Random, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"expected a schema that ends, got one that nests deeper: {root}")
    schema = _resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return generator.choice(schema["enum"])
    for union in ("anyOf", "oneOf"):
        if schema.get(union):
            return _draw(generator.choice(schema[union]), root, generator, depth + 1)
    if schema.get("allOf"):
        return _draw(schema["allOf"][0], root, generator, depth + 1)
    return _draw_typed(_type_of(schema), schema, root, generator, depth)


def _draw_typed(
    kind: str | None, schema: JsonObject, root: JsonObject, generator: random.Random, depth: int
) -> Any:
    match kind:
        case "object":
            properties = schema.get("properties", {})
            return {
                name: _draw(properties.get(name, {}), root, generator, depth + 1)
                for name in schema.get("required", [])
            }
        case "array":
            return [_draw(one, root, generator, depth + 1) for one in _items(schema, generator)]
        case "string":
            shortest = schema.get("minLength", 1)
            longest = schema.get("maxLength", shortest + _DEFAULT_REACH)
            length = generator.randint(shortest, max(shortest, min(longest, shortest + 8)))
            return "".join(generator.choices(string.ascii_lowercase, k=length))
        case "integer":
            low, high = _bounds(schema)
            return generator.randint(int(low), int(high))
        case "number":
            return generator.uniform(*_bounds(schema))
        case "boolean":
            return generator.random() < 0.5
    return None


def _items(schema: JsonObject, generator: random.Random) -> list[JsonObject]:
    """The schemas of an array's elements."""
    if "prefixItems" in schema:
        return list(schema["prefixItems"])
    shortest: int = schema.get("minItems", 0)
    longest: int = schema.get("maxItems", shortest)
    length = generator.randint(shortest, max(shortest, min(longest, shortest + _DEFAULT_REACH)))
    return [schema.get("items", {})] * length


def _bounds(schema: JsonObject) -> tuple[float, float]:
    low: float | None = schema.get("minimum")
    high: float | None = schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + 1
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - 1
    if low is None:
        low = 0 if high is None or high >= 0 else high - _DEFAULT_REACH
    if high is None or high < low:
        high = low + _DEFAULT_REACH
    return low, high


def _fault(value: Any, schema: JsonObject, root: JsonObject, place: str) -> str:
    schema = _resolved(schema, root)
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        faults = [_fault(value, branch, root, place) for branch in branches]
        return "" if "" in faults else faults[0]
    for part in schema.get("allOf", ()):
        if found := _fault(value, part, root, place):
            return found
    if "const" in schema and value != schema["const"]:
        return f"{place or 'value'}: expected {schema['const']!r}, got {value!r}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{place or 'value'}: expected one of {schema['enum']}, got {value!r}"
    if "type" in schema and not _is(value, schema["type"]):
        return f"{place or 'value'}: expected {schema['type']}, got {value!r}"
    if isinstance(value, dict):
        return _object_fault(value, schema, root, place)
    if isinstance(value, list):
        return _array_fault(value, schema, root, place)
    return _number_fault(value, schema, place)


def _object_fault(value: JsonObject, schema: JsonObject, root: JsonObject, place: str) -> str:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"{place or 'value'}: expected the field '{name}', got {sorted(value)}"
    extra = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in properties:
            found = _fault(item, properties[name], root, f"{place}.{name}".lstrip("."))
        elif extra is False:
            return f"{place or 'value'}: expected no field '{name}', got {item!r}"
        else:
            found = _fault(item, extra if isinstance(extra, dict) else {}, root, f"{place}.{name}")
        if found:
            return found
    return ""


def _array_fault(value: list[Any], schema: JsonObject, root: JsonObject, place: str) -> str:
    longest = schema.get("maxItems", len(value))
    if not schema.get("minItems", 0) <= len(value) <= longest:
        return (
            f"{place or 'value'}: expected {schema.get('minItems', 0)} to"
            f" {schema.get('maxItems', 'any number of')} items, got {len(value)}"
        )
    prefix = schema.get("prefixItems", [])
    for index, item in enumerate(value):
        one = prefix[index] if index < len(prefix) else schema.get("items", {})
        if isinstance(one, dict) and (found := _fault(item, one, root, f"{place}.{index}")):
            return found
    return ""


def _number_fault(value: Any, schema: JsonObject, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if value < schema.get("minimum", value) or value > schema.get("maximum", value):
        bounds = f"{schema.get('minimum', '-inf')} to {schema.get('maximum', 'inf')}"
        return f"{place or 'value'}: expected {bounds}, got {value}"
    return ""


def _is(value: Any, kinds: str | list[str]) -> bool:
    names = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, float) and value.is_integer() and "integer" in names:
        return True
    return any(isinstance(value, _TYPES.get(name, (object,))) for name in names)


def _type_of(schema: JsonObject) -> str | None:
    kind = schema.get("type")
    if isinstance(kind, list):
        return kind[0] if kind else None
    if kind is None and "properties" in schema:
        return "object"
    return kind


def _resolved(schema: JsonObject, root: JsonObject) -> JsonObject:
    """The schema that a reference within the root points at."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for part in reference.removeprefix("#/").split("/"):
            found = found.get(part, {}) if isinstance(found, dict) else {}
        schema = found
    return schema
