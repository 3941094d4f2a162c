"""From what a server says of its actions and observations to Gymnasium's spaces.

    integer within bounds                Discrete
    list of integers within bounds       MultiDiscrete
    list (of lists) of numbers           Box

A list's length is that of the schema, or of an example where the schema leaves it open.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from ludus.env.types import JsonObject

_PREFERRED = ("action", "observation", "info_state")
"""Where several fields hold numbers, these are what is played with."""
_BESIDE = ("metadata", "legal_actions", "num_legal_actions", "reward", "done")

AnySpace = spaces.Space[Any]


def field_and_space(schema: JsonObject, example: JsonObject) -> tuple[str, AnySpace] | None:
    """The field that holds numbers, and its space; None where there is none, or no telling.

    Args:
        example: an object of this schema, or an empty one.
    """
    found = {
        name: space
        for name, of_field in schema.get("properties", {}).items()
        if name not in _BESIDE and (space := space_of(of_field, example.get(name))) is not None
    }
    for name in _PREFERRED:
        if name in found:
            return name, found[name]
    return next(iter(found.items())) if len(found) == 1 else None


def space_of(schema: JsonObject, example: Any = None) -> AnySpace | None:
    """The space of values that fit the schema; None where they are no bounded numbers."""
    leaves = _leaves(schema, example)
    if leaves is None:
        return None
    shape, kinds = leaves
    low = np.array([kind.get("minimum", -math.inf) for kind in kinds])
    high = np.array([kind.get("maximum", math.inf) for kind in kinds])
    is_bounded = bool(np.isfinite(low).all() and np.isfinite(high).all())
    if all(kind.get("type") == "number" for kind in kinds):
        lowest, highest = low.astype(np.float32), high.astype(np.float32)
        return spaces.Box(lowest.reshape(shape), highest.reshape(shape), dtype=np.float32)
    if not is_bounded:
        return None
    first, counts = low.astype(np.int64), (high - low + 1).astype(np.int64)
    if shape == ():
        return spaces.Discrete(int(counts[0]), start=int(first[0]))
    return spaces.MultiDiscrete(counts.reshape(shape), start=first.reshape(shape))


def _leaves(schema: JsonObject, example: Any) -> tuple[tuple[int, ...], list[JsonObject]] | None:
    """The shape of a value, and the schema of each of its numbers in order."""
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return (), [schema]
    if kind != "array":
        return None
    parts = schema.get("prefixItems") or _repeated(schema, example)
    if not parts:
        return None
    examples = example if isinstance(example, list) else [None] * len(parts)
    inner = [_leaves(part, one) for part, one in zip(parts, examples, strict=False)]
    shapes = {one[0] if one is not None else None for one in inner}
    if len(shapes) != 1 or None in shapes:
        return None
    shape = next(iter(shapes))
    assert shape is not None
    return (len(parts), *shape), [leaf for one in inner if one is not None for leaf in one[1]]


def _repeated(schema: JsonObject, example: Any) -> list[JsonObject]:
    """The schema of each item of a list of equal ones."""
    shortest, longest = schema.get("minItems"), schema.get("maxItems")
    if shortest is not None and shortest == longest:
        return [schema.get("items", {})] * int(shortest)
    return [schema.get("items", {})] * len(example) if isinstance(example, list) else []
