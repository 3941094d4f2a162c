"""Random values that fit a JSON schema, and descriptions of values that do not fit.

The supported schemas are those of pydantic and of OpenEnv's models: types, bounds, enums,
references, unions, nested objects and arrays.
"""

from __future__ import annotations

import math
import random
import re
import string
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import ConfigError

_DEFAULT_RANGE = 8
"""Range of numbers without bounds, and extra length of lists and texts without a maximum."""
_MAX_DEPTH = 12
_CHARACTER_PATTERN = re.compile(r"\^\[((?:[^\\\]^-]|\\.)+)\]\*\$", re.DOTALL)
"""A class of characters without ranges, repeated any number of times."""


def draw_value(schema: JsonObject, generator: random.Random) -> Any:
    """Draw a value that fits the schema. An object gets only its required fields.

    Raises:
        ConfigError: the schema is nested too deeply.
    """
    return _draw(schema, schema, generator, 0)


def draw_action(
    schema: JsonObject, observation: JsonObject, generator: random.Random
) -> JsonObject:
    """Draw an action from the schema, or from the observation's `legal_actions` if it has them."""
    action = draw_value(schema, generator)
    if not isinstance(action, dict):
        raise ConfigError(f"the action schema must be a schema of an object, got {schema}")
    legal_actions = observation.get("legal_actions")
    required_fields = schema.get("required", [])
    if isinstance(legal_actions, list) and legal_actions and len(required_fields) == 1:
        action[required_fields[0]] = generator.choice(legal_actions)
    return action


def random_policy(description: EnvironmentDescription) -> FixedPolicy:
    """Return a policy that takes random actions in an environment with this description."""
    return make_random_policy(description.action_schema)


def make_random_policy(action_schema: JsonObject) -> FixedPolicy:
    """Return a policy that takes random actions of this schema, legal if they are listed."""

    def play(observation: JsonObject, rng: random.Random) -> JsonObject:
        return draw_action(action_schema, observation, rng)

    return play


def find_schema_fault(schema: JsonObject) -> str:
    """Return what is wrong with the schema, or "" if it is valid."""
    # Servers only draw values, so they need not load this library at their start.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"the JSON schema is not valid: {error.message}"
    return ""


def find_fault(value: Any, schema: JsonObject) -> str:
    """Return what is wrong with the value and in which field, or "" if the value fits."""
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
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            return _draw(generator.choice(schema[keyword]), root, generator, depth + 1)
    if schema.get("allOf"):
        return _draw(schema["allOf"][0], root, generator, depth + 1)
    return _draw_typed(_read_type(schema), schema, root, generator, depth)


def _draw_typed(
    type_name: str | None,
    schema: JsonObject,
    root: JsonObject,
    generator: random.Random,
    depth: int,
) -> Any:
    match type_name:
        case "object":
            properties = schema.get("properties", {})
            return {
                name: _draw(properties.get(name, {}), root, generator, depth + 1)
                for name in schema.get("required", [])
            }
        case "array":
            item_schemas = _draw_item_schemas(schema, generator)
            return [_draw(item_schema, root, generator, depth + 1) for item_schema in item_schemas]
        case "string":
            min_length = schema.get("minLength", 1)
            max_length = schema.get("maxLength", min_length + _DEFAULT_RANGE)
            length = _draw_length(min_length, max_length, generator)
            return "".join(generator.choices(_list_characters(schema), k=length))
        case "integer":
            minimum, maximum = _read_bounds(schema)
            return generator.randint(int(minimum), int(maximum))
        case "number":
            return _draw_number(*_read_bounds(schema), generator)
        case "boolean":
            return generator.random() < 0.5
    return None


def _draw_item_schemas(schema: JsonObject, generator: random.Random) -> list[JsonObject]:
    if "prefixItems" in schema:
        return list(schema["prefixItems"])
    min_items: int = schema.get("minItems", 0)
    max_items: int = schema.get("maxItems", min_items)
    length = _draw_length(min_items, max_items, generator)
    return [schema.get("items", {})] * length


def _draw_number(minimum: float, maximum: float, generator: random.Random) -> float:
    if math.isfinite(maximum - minimum):
        return min(max(generator.uniform(minimum, maximum), minimum), maximum)
    fraction = generator.random()
    return minimum * (1 - fraction) + maximum * fraction


def _list_characters(schema: JsonObject) -> str:
    """Return the characters of a pattern like `^[ab\\-]*$`, otherwise lower-case letters."""
    match = _CHARACTER_PATTERN.fullmatch(schema.get("pattern", ""))
    return re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL) if match else string.ascii_lowercase


def _draw_length(minimum: int, maximum: int, generator: random.Random) -> int:
    return generator.randint(minimum, max(minimum, min(maximum, minimum + _DEFAULT_RANGE)))


def _read_bounds(schema: JsonObject) -> tuple[float, float]:
    minimum: float | None = schema.get("minimum")
    maximum: float | None = schema.get("maximum")
    if "exclusiveMinimum" in schema:
        minimum = schema["exclusiveMinimum"] + 1
    if "exclusiveMaximum" in schema:
        maximum = schema["exclusiveMaximum"] - 1
    if minimum is None:
        minimum = 0 if maximum is None or maximum >= 0 else maximum - _DEFAULT_RANGE
    if maximum is None or maximum < minimum:
        maximum = minimum + _DEFAULT_RANGE
    return minimum, maximum


def _read_type(schema: JsonObject) -> str | None:
    type_name = schema.get("type")
    if isinstance(type_name, list):
        return type_name[0] if type_name else None
    if type_name is None and "properties" in schema:
        return "object"
    return type_name


def _resolve(schema: JsonObject, root: JsonObject) -> JsonObject:
    """Follow the schema's references within the root."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        subschema: Any = root
        for key in reference.removeprefix("#/").split("/"):
            subschema = subschema.get(key, {}) if isinstance(subschema, dict) else {}
        schema = subschema
    return schema
