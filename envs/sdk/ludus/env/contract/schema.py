"""Random values that fit a JSON schema, and what is wrong with values that do not.

What is drawn covers what pydantic and OpenEnv's models write: types, bounds, enums,
references, unions, nested objects and arrays.
"""

from __future__ import annotations

import random
import string
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import ConfigError

_DEFAULT_REACH = 8
"""How far numbers without bounds go, and how long lists and texts without bounds get."""
_MAX_DEPTH = 12


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


def random_policy(description: EnvironmentDescription) -> FixedPolicy:
    """A policy that takes a random action of any environment that describes itself so."""

    def play(observation: JsonObject, rng: random.Random) -> JsonObject:
        return random_action(description.action_schema, observation, rng)

    return play


def fault_of_schema(schema: JsonObject) -> str:
    """What is wrong with the schema itself; empty when it is one."""
    # Servers draw values at their start and judge none: they need not load this.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"expected a JSON schema, got one with a mistake: {error.message}"
    return ""


def fault_of(value: Any, schema: JsonObject) -> str:
    """What is wrong with the value, with the field; empty when it fits."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    if mistake := fault_of_schema(schema):
        return mistake
    try:
        fault = best_match(Draft202012Validator(schema).iter_errors(value))
    except Unresolvable as error:
        return f"expected a JSON schema, got one with a mistake: {error}"
    if fault is None:
        return ""
    return f"{'.'.join(map(str, fault.absolute_path)) or 'value'}: {fault.message}"


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
