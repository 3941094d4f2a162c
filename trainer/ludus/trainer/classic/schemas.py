"""Gymnasium spaces for the JSON schemas of a server's actions and observations.

    integer within bounds                Discrete
    list of integers within bounds       MultiDiscrete
    list (of lists) of numbers           Box

The length of a list comes from the schema, or from an example if the schema leaves it open.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from ludus.env.types import JsonObject

_PREFERRED_FIELDS = ("action", "observation", "info_state")
"""Fields that are used if several fields contain numbers."""
_IGNORED_FIELDS = ("metadata", "legal_actions", "num_legal_actions", "reward", "done")

AnySpace = spaces.Space[Any]


def find_numeric_field(schema: JsonObject, example: JsonObject) -> tuple[str, AnySpace] | None:
    """Return the field that contains numbers and its space; None if there is no such field.

    None is also returned if several fields contain numbers and none of them is preferred.

    Args:
        example: an object with this schema, or an empty object.
    """
    candidates = {
        name: space
        for name, field in schema.get("properties", {}).items()
        if name not in _IGNORED_FIELDS
        and (space := schema_space(field, example.get(name))) is not None
    }
    for name in _PREFERRED_FIELDS:
        if name in candidates:
            return name, candidates[name]
    return next(iter(candidates.items())) if len(candidates) == 1 else None


def schema_space(schema: JsonObject, example: Any = None) -> AnySpace | None:
    """Return the space of the values of a schema; None if they are not bounded numbers."""
    leaves = _flatten(schema, example)
    if leaves is None:
        return None
    shape, numbers = leaves
    low = np.array([number.get("minimum", -math.inf) for number in numbers])
    high = np.array([number.get("maximum", math.inf) for number in numbers])
    is_bounded = bool(np.isfinite(low).all() and np.isfinite(high).all())
    if all(number.get("type") == "number" for number in numbers):
        box_low, box_high = low.astype(np.float32), high.astype(np.float32)
        return spaces.Box(box_low.reshape(shape), box_high.reshape(shape), dtype=np.float32)
    if not is_bounded:
        return None
    start, counts = low.astype(np.int64), (high - low + 1).astype(np.int64)
    if shape == ():
        return spaces.Discrete(int(counts[0]), start=int(start[0]))
    return spaces.MultiDiscrete(counts.reshape(shape), start=start.reshape(shape))


def _flatten(schema: JsonObject, example: Any) -> tuple[tuple[int, ...], list[JsonObject]] | None:
    """Return the shape of a value, and the schemas of its numbers in row-major order."""
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return (), [schema]
    if kind != "array":
        return None
    items = schema.get("prefixItems") or _repeat_items(schema, example)
    if not items:
        return None
    examples = example if isinstance(example, list) else [None] * len(items)
    flattened = [_flatten(*pair) for pair in zip(items, examples, strict=False)]
    parts = [part for part in flattened if part is not None]
    shapes = {shape for shape, _ in parts}
    if len(parts) != len(flattened) or len(shapes) != 1:
        return None
    return (len(items), *shapes.pop()), [number for _, numbers in parts for number in numbers]


def _repeat_items(schema: JsonObject, example: Any) -> list[JsonObject]:
    """Return the schema of each item of a list whose items share one schema."""
    min_items, max_items = schema.get("minItems"), schema.get("maxItems")
    if min_items is not None and min_items == max_items:
        return [schema.get("items", {})] * int(min_items)
    return [schema.get("items", {})] * len(example) if isinstance(example, list) else []
