"""Conversion of Gymnasium's spaces and their elements to JSON.

    space --make_codec--> SpaceCodec: annotation (for pydantic and the schema),
                                      decode (JSON to an element), encode (an element to JSON)

Boxes with more than `MAX_LISTED_ELEMENTS` elements, such as images, are not JSON. Their field is
null, and the array is sent separately under the field's path. For clients without support for
separate arrays, the field is an object with shape, dtype and data. The elements of a custom space
are text if its samples are text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from gymnasium import spaces
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, IllegalActionError

MAX_LISTED_ELEMENTS = 1024
"""Maximum number of elements of a box in JSON; larger boxes are tensors."""
_MAX_SEPARATE_BOUNDS = 64
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
    min_value, max_value = int(space.start), int(space.start + space.n - 1)
    return SpaceCodec(
        Annotated[int, Field(ge=min_value, le=max_value)],
        lambda element_json: space.dtype.type(element_json),
        lambda element, tensors: int(element),
    )


def _make_box_codec(space: spaces.Box, path: str) -> SpaceCodec:
    if int(np.prod(space.shape)) > MAX_LISTED_ELEMENTS:
        return _make_tensor_codec(space, path)
    number_type = int if np.issubdtype(space.dtype, np.integer) else float
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    return _make_list_codec(space, number_type, low, high)


def _make_tensor_codec(space: spaces.Box, path: str) -> SpaceCodec:
    description = f"separate tensor '{path}', {space.dtype}, shape {list(space.shape)}"

    def encode(element: Any, tensors: Tensors) -> None:
        tensors[path] = np.asarray(element, dtype=space.dtype)

    def refuse_json(element_json: Any) -> Any:
        raise IllegalActionError(f"a value for {space} is too large for JSON")

    annotation = Annotated[_Tensor | None, Field(description=description)]
    return SpaceCodec(annotation, refuse_json, encode, is_tensor=True)


def _make_multi_discrete_codec(space: spaces.MultiDiscrete, path: str) -> SpaceCodec:
    low = np.asarray(space.start, dtype=np.float64)
    return _make_list_codec(space, int, low, low + np.asarray(space.nvec, dtype=np.float64) - 1)


def _make_multi_binary_codec(space: spaces.MultiBinary, path: str) -> SpaceCodec:
    low = np.zeros(space.shape)
    return _make_list_codec(space, int, low, low + 1)


def _make_list_codec(
    space: spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary,
    number_type: type[int] | type[float],
    low: np.ndarray,
    high: np.ndarray,
) -> SpaceCodec:
    """Return the codec for numbers in nested lists with the space's shape."""

    def make_number_type(min_value: float, max_value: float) -> Any:
        field_limits: JsonObject = {"allow_inf_nan": False} if number_type is float else {}
        if np.isfinite(min_value):
            field_limits["ge"] = number_type(min_value)
        if np.isfinite(max_value):
            field_limits["le"] = number_type(max_value)
        return Annotated[number_type, Field(**field_limits)]

    annotation: Any
    is_uniform = low.size == 0 or (np.ptp(_to_finite(low)) == 0 and np.ptp(_to_finite(high)) == 0)
    if not is_uniform and low.ndim == 1 and low.size <= _MAX_SEPARATE_BOUNDS:
        element_types = tuple(make_number_type(*limits) for limits in zip(low, high, strict=True))
        annotation = tuple.__class_getitem__(element_types)
    else:
        annotation = make_number_type(low.min(), high.max()) if low.size else number_type
        for length in reversed(low.shape):
            annotation = Annotated[list[annotation], Field(min_length=length, max_length=length)]
    return SpaceCodec(
        annotation,
        lambda element_json: np.asarray(element_json, dtype=space.dtype),
        lambda element, tensors: np.asarray(element).tolist(),
    )


def _to_finite(bounds: np.ndarray) -> np.ndarray:
    # The difference of two infinities is NaN.
    return np.asarray(np.nan_to_num(bounds, posinf=1e300, neginf=-1e300) / 2)


def _make_text_codec(space: spaces.Text, path: str) -> SpaceCodec:
    length_field = Field(min_length=space.min_length, max_length=space.max_length)
    return SpaceCodec(Annotated[str, length_field], str, lambda element, tensors: str(element))


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
    codecs = {str(key): make_codec(child, f"{path}.{key}") for key, child in space.spaces.items()}
    field_types = TypedDict(  # type: ignore[misc]
        f"{path.rpartition('.')[2].title()}Fields",
        {name: codec.annotation for name, codec in codecs.items()},
    )
    return SpaceCodec(
        with_config(ConfigDict(extra="forbid"))(field_types),
        lambda element_json: {
            name: codec.decode(element_json[name]) for name, codec in codecs.items()
        },
        lambda element, tensors: {
            name: codec.encode(element[name], tensors) for name, codec in codecs.items()
        },
    )


def _make_sequence_codec(space: spaces.Sequence, path: str) -> SpaceCodec:
    codec = make_codec(space.feature_space, path)
    return SpaceCodec(
        list[codec.annotation],  # type: ignore[name-defined]
        lambda element_json: tuple(codec.decode(child_json) for child_json in element_json),
        lambda element, tensors: [codec.encode(child, tensors) for child in element],
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
}
