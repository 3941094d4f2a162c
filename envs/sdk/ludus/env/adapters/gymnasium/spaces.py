"""Conversion of Gymnasium's spaces and their elements to JSON.

    space --make_codec--> SpaceCodec: annotation (for pydantic and the schema),
                                      decode (JSON to an element), encode (an element to JSON)

Boxes with more than `MAX_LISTED_ELEMENTS` elements, such as images, are not JSON. Their field is
null, and the array is sent separately under the field's path. For clients without support for
separate arrays, the field is an object with shape, dtype and data. The elements of a custom space
are text if its samples are text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, IllegalActionError

MAX_LISTED_ELEMENTS = 1024
"""Maximum number of elements of a box in JSON; larger boxes are tensors."""
_MAX_REPR_CHARS = 200

Tensors = dict[str, np.ndarray]


class _Tensor(TypedDict):
    """An array as JSON."""

    dtype: str
    shape: list[int]
    data: str
    """Bytes in C order, little endian, in base64."""


AnySpace = spaces.Space[Any]


@dataclass(frozen=True, slots=True)
class SpaceCodec:
    """A converter between the elements of one space and JSON."""

    annotation: Any
    decode: Callable[[Any], Any]
    """Converts JSON to an element, without checking that the space contains the element."""
    encode: Callable[[Any, Tensors], Any]
    """Converts an element to JSON, and adds arrays that are too large for JSON to the tensors."""
    is_tensor: bool = False
    """True if the elements are sent only as tensors, and not in the JSON."""


def make_codec(space: AnySpace, path: str) -> SpaceCodec:
    """Return the codec of a space.

    Args:
        path: name of the field, and of its tensor.

    Raises:
        ConfigError: the class of the space is not supported.
    """
    for space_class, make_codec_for_class in _CODEC_MAKERS.items():
        if isinstance(space, space_class):
            return make_codec_for_class(space, path)
    if _samples_text(space):
        return SpaceCodec(str, str, lambda element, tensors: str(element))
    raise ConfigError(
        f"unsupported space {space} for '{path}'; use one of"
        f" {', '.join(space.__name__ for space in _CODEC_MAKERS)} or a space of text, or wrap the"
        " environment so that it has one of them"
    )


def _samples_text(space: AnySpace) -> bool:
    try:
        return isinstance(space.sample(), str)
    except Exception:  # noqa: BLE001 - third-party code may raise anything
        return False


def to_plain_json(value: Any) -> Any:
    """Convert a value to plain JSON. A value without a JSON form becomes a shortened `repr`."""
    if isinstance(value, np.ndarray) and value.size > MAX_LISTED_ELEMENTS:
        return f"array of shape {value.shape}, {value.dtype}"
    if isinstance(value, np.ndarray | np.generic):
        return to_plain_json(value.tolist())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): to_plain_json(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain_json(child) for child in value]
    return repr(value)[:_MAX_REPR_CHARS]


def _make_discrete_codec(space: spaces.Discrete, path: str) -> SpaceCodec:
    min_value = int(space.start)
    return SpaceCodec(
        Annotated[int, Field(ge=min_value, le=min_value + int(space.n) - 1)],
        lambda element_json: space.dtype.type(element_json),
        lambda element, tensors: int(element),
    )


def _make_box_codec(space: spaces.Box, path: str) -> SpaceCodec:
    if int(np.prod(space.shape)) > MAX_LISTED_ELEMENTS:
        return _make_tensor_codec(space, path)
    if np.issubdtype(space.dtype, np.floating):
        return _make_list_codec(space, float, *_find_decimal_bounds(space))
    return _make_list_codec(space, int, space.low.astype(object), space.high.astype(object))


def _find_decimal_bounds(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds in float64 that also contain the shortest decimals of the space's bounds.

    The decimal 0.1 is below the float32 closest to it, and becomes this number in the space.
    """
    exact_low, exact_high = space.low.astype(np.float64), space.high.astype(np.float64)
    low, high = space.low.astype(str).astype(float), space.high.astype(str).astype(float)
    return np.minimum(low, exact_low), np.maximum(high, exact_high)


def _make_tensor_codec(space: spaces.Box, path: str) -> SpaceCodec:
    description = f"separate tensor '{path}', {space.dtype}, shape {list(space.shape)}"

    def encode(element: Any, tensors: Tensors) -> None:
        tensors[path] = np.asarray(element, dtype=space.dtype)

    def refuse_json(element_json: Any) -> Any:
        raise IllegalActionError(f"a value for {space} is too large for JSON")

    annotation = Annotated[_Tensor | None, Field(description=description)]
    return SpaceCodec(annotation, refuse_json, encode, is_tensor=True)


def _make_multi_discrete_codec(space: spaces.MultiDiscrete, path: str) -> SpaceCodec:
    low = np.asarray(space.start).astype(object)
    return _make_list_codec(space, int, low, low + np.asarray(space.nvec).astype(object) - 1)


def _make_multi_binary_codec(space: spaces.MultiBinary, path: str) -> SpaceCodec:
    low = np.zeros(space.shape, dtype=object)
    return _make_list_codec(space, int, low, low + 1)


def _make_list_codec(
    space: spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary,
    number_type: type[int] | type[float],
    low: np.ndarray,
    high: np.ndarray,
) -> SpaceCodec:
    """Return the codec for numbers in nested lists with the space's shape."""
    low, high = np.asarray(low), np.asarray(high)
    if low.size > MAX_LISTED_ELEMENTS:  # separate bounds would make a schema too long
        low, high = np.full_like(low, low.min()), np.full_like(high, high.max())

    def decode(element_json: Any) -> np.ndarray:
        with np.errstate(over="ignore"):
            element = np.asarray(element_json, dtype=space.dtype).reshape(space.shape)
        if number_type is float and not np.isfinite(element).all():
            raise IllegalActionError(f"expected numbers that fit {space.dtype}, got {element_json}")
        return element

    def encode(element: Any, tensors: Tensors) -> Any:
        # An element that does not fit the space keeps its numbers, so that its error shows them.
        numbers = np.asarray(element)
        if number_type is float:
            return numbers.astype(space.dtype).tolist()
        return (numbers.astype(np.int8) if numbers.dtype == np.bool_ else numbers).tolist()

    return SpaceCodec(_make_list_type(number_type, low, high), decode, encode)


def _make_list_type(number_type: type[Any], low: np.ndarray, high: np.ndarray) -> Any:
    """Return the type of nested lists of numbers, with separate bounds for parts that differ."""
    if np.ndim(low) == 0:
        return _make_number_type(number_type, low, high)
    length = len(low)
    if length and not (np.all(low == low[0]) and np.all(high == high[0])):
        parts = [_make_list_type(number_type, *bounds) for bounds in zip(low, high, strict=True)]
        return tuple.__class_getitem__(tuple(parts))
    part: Any = _make_list_type(number_type, low[0], high[0]) if length else Any
    return Annotated[list[part], Field(min_length=length, max_length=length)]


def _make_number_type(number_type: type[Any], min_value: Any, max_value: Any) -> Any:
    if number_type is int:
        return Annotated[int, Field(ge=int(min_value), le=int(max_value))]
    field_limits: JsonObject = {"allow_inf_nan": False}
    if np.isfinite(min_value):
        field_limits["ge"] = float(min_value)
    if np.isfinite(max_value):
        field_limits["le"] = float(max_value)
    return Annotated[float, Field(**field_limits)]


def _make_text_codec(space: spaces.Text, path: str) -> SpaceCodec:
    text_field = Field(
        min_length=space.min_length,
        max_length=space.max_length,
        pattern=f"^[{re.escape(space.characters)}]*$",
    )
    return SpaceCodec(Annotated[str, text_field], str, lambda element, tensors: str(element))


def _make_tuple_codec(space: spaces.Tuple[Any], path: str) -> SpaceCodec:
    codecs = [make_codec(child, f"{path}.{index}") for index, child in enumerate(space.spaces)]
    return SpaceCodec(
        tuple.__class_getitem__(tuple(codec.annotation for codec in codecs)),
        lambda element_json: tuple(
            codec.decode(part) for codec, part in zip(codecs, element_json, strict=True)
        ),
        lambda element, tensors: [
            codec.encode(part, tensors) for codec, part in zip(codecs, element, strict=True)
        ],
    )


def _make_dict_codec(space: spaces.Dict, path: str) -> SpaceCodec:
    codecs = {
        str(key): (key, make_codec(child, f"{path}.{key}")) for key, child in space.spaces.items()
    }
    field_types = TypedDict(  # type: ignore[misc]
        f"{path.rpartition('.')[2].title()}Fields",
        {name: codec.annotation for name, (_, codec) in codecs.items()},
    )
    return SpaceCodec(
        with_config(ConfigDict(extra="forbid"))(field_types),
        lambda element_json: {
            key: codec.decode(element_json[name]) for name, (key, codec) in codecs.items()
        },
        lambda element, tensors: {
            name: codec.encode(element[key], tensors) for name, (key, codec) in codecs.items()
        },
    )


def _make_sequence_codec(space: spaces.Sequence, path: str) -> SpaceCodec:
    codec = make_codec(space.feature_space, path)

    def decode(element_json: Any) -> Any:
        children = tuple(codec.decode(child_json) for child_json in element_json)
        if not space.stack:
            return children
        if not children:
            return create_empty_array(space.feature_space, 0)
        empty_array: Any = create_empty_array(space.feature_space, len(children))
        return concatenate(space.feature_space, children, empty_array)

    def encode(element: Any, tensors: Tensors) -> list[Any]:
        children = iterate(space.stacked_feature_space, element) if space.stack else element
        children_json = []
        for index, child in enumerate(children):
            child_tensors: Tensors = {}
            children_json.append(codec.encode(child, child_tensors))
            for name, array in child_tensors.items():
                tensors[f"{path}.{index}{name.removeprefix(path)}"] = array
        return children_json

    return SpaceCodec(list[codec.annotation], decode, encode)  # type: ignore[name-defined]


def _make_one_of_codec(space: Any, path: str) -> SpaceCodec:
    """Return the codec for pairs of a space's index and an element of this space."""
    codecs = [make_codec(child, f"{path}.{index}") for index, child in enumerate(space.spaces)]
    pairs = [tuple[Literal[index], codec.annotation] for index, codec in enumerate(codecs)]  # type: ignore[valid-type,name-defined]
    return SpaceCodec(
        Union.__getitem__(tuple(pairs)),
        lambda element_json: (element_json[0], codecs[element_json[0]].decode(element_json[1])),
        lambda element, tensors: [
            int(element[0]),
            codecs[int(element[0])].encode(element[1], tensors),
        ],
    )


_CODEC_MAKERS: dict[type[AnySpace], Callable[[Any, str], SpaceCodec]] = {
    spaces.Discrete: _make_discrete_codec,
    spaces.Box: _make_box_codec,
    spaces.MultiDiscrete: _make_multi_discrete_codec,
    spaces.MultiBinary: _make_multi_binary_codec,
    spaces.Text: _make_text_codec,
    spaces.Tuple: _make_tuple_codec,
    spaces.Dict: _make_dict_codec,
    spaces.Sequence: _make_sequence_codec,
    spaces.OneOf: _make_one_of_codec,
}
