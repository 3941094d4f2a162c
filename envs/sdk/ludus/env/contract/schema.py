"""Random values that fit a JSON schema, and the faults of values that do not.

Random values support the schemas of pydantic and of OpenEnv's models: types, bounds, enums,
references, unions, nested objects and arrays.
"""

from __future__ import annotations

import random
import string
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import ConfigError

_DEFAULT_RANGE = 8
"""Range of numbers without bounds, and extra length of lists and texts without a maximum."""
_MAX_DEPTH = 12


def random_value(schema: JsonObject, generator: random.Random) -> Any:
    """Draw a value that fits the schema. An object gets only its required fields.

    Raises:
        ConfigError: the schema is nested too deeply.
    """
    return _draw(schema, schema, generator, 0)


def random_action(
    schema: JsonObject, observation: JsonObject, generator: random.Random
) -> JsonObject:
    """Draw an action from the schema, or from the observation's `legal_actions` if it has them."""
    action = random_value(schema, generator)
    if not isinstance(action, dict):
        raise ConfigError(f"the action schema must be a schema of an object, got {schema}")
    legal_actions = observation.get("legal_actions")
    required_fields = schema.get("required", [])
    if isinstance(legal_actions, list) and legal_actions and len(required_fields) == 1:
        action[required_fields[0]] = generator.choice(legal_actions)
    return action


def random_policy(description: EnvironmentDescription) -> FixedPolicy:
    """Return a policy that takes random actions in an environment with this description."""

    def play(observation: JsonObject, rng: random.Random) -> JsonObject:
        return random_action(description.action_schema, observation, rng)

    return play


def find_schema_fault(schema: JsonObject) -> str:
    """Return the fault of the schema itself; empty if the schema is valid."""
    # Servers only draw values, so they need not load this library at their start.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"the JSON schema is not valid: {error.message}"
    return ""


def find_fault(value: Any, schema: JsonObject) -> str:
    """Return the fault of the value with its field; empty if the value fits the schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    if schema_fault := find_schema_fault(schema):
        return schema_fault
    try:
        fault = best_match(Draft202012Validator(schema).iter_errors(value))
    except Unresolvable as error:
        return f"the JSON schema is not valid: {error}"
    if fault is None:
        return ""
    return f"{'.'.join(map(str, fault.absolute_path)) or 'value'}: {fault.message}"


def _draw(schema: JsonObject, root: JsonObject, generator: random.Random, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"the schema must be nested at most {_MAX_DEPTH} levels deep: {root}")
    schema = _resolve(schema, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return generator.choice(schema["enum"])
    for union in ("anyOf", "oneOf"):
        if schema.get(union):
            return _draw(generator.choice(schema[union]), root, generator, depth + 1)
    if schema.get("allOf"):
        return _draw(schema["allOf"][0], root, generator, depth + 1)
    return _draw_typed(_read_type(schema), schema, root, generator, depth)


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
            items = _item_schemas(schema, generator)
            return [_draw(item, root, generator, depth + 1) for item in items]
        case "string":
            min_length = schema.get("minLength", 1)
            max_length = schema.get("maxLength", min_length + _DEFAULT_RANGE)
            length = _draw_length(min_length, max_length, generator)
            return "".join(generator.choices(string.ascii_lowercase, k=length))
        case "integer":
            low, high = _bounds(schema)
            return generator.randint(int(low), int(high))
        case "number":
            return generator.uniform(*_bounds(schema))
        case "boolean":
            return generator.random() < 0.5
    return None


def _item_schemas(schema: JsonObject, generator: random.Random) -> list[JsonObject]:
    if "prefixItems" in schema:
        return list(schema["prefixItems"])
    min_items: int = schema.get("minItems", 0)
    max_items: int = schema.get("maxItems", min_items)
    length = _draw_length(min_items, max_items, generator)
    return [schema.get("items", {})] * length


def _draw_length(minimum: int, maximum: int, generator: random.Random) -> int:
    return generator.randint(minimum, max(minimum, min(maximum, minimum + _DEFAULT_RANGE)))


def _bounds(schema: JsonObject) -> tuple[float, float]:
    low: float | None = schema.get("minimum")
    high: float | None = schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + 1
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - 1
    if low is None:
        low = 0 if high is None or high >= 0 else high - _DEFAULT_RANGE
    if high is None or high < low:
        high = low + _DEFAULT_RANGE
    return low, high


def _read_type(schema: JsonObject) -> str | None:
    kind = schema.get("type")
    if isinstance(kind, list):
        return kind[0] if kind else None
    if kind is None and "properties" in schema:
        return "object"
    return kind


def _resolve(schema: JsonObject, root: JsonObject) -> JsonObject:
    """Follow the schema's references within the root."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part, {}) if isinstance(target, dict) else {}
        schema = target
    return schema
