"""Conversion of Gymnasium's spaces and their elements to JSON.

    space --make_codec--> SpaceCodec: annotation (for pydantic and the schema),
                                      decode (JSON to an element), encode (an element to JSON)

Boxes with more than `MAX_LISTED_ELEMENTS` elements, such as images, are not JSON. Their field is
null, and the array is sent separately under the field's path. For clients without support for
separate arrays, the field is an object with shape, dtype and data. A custom kind of space is text
if its samples are text.
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
_MAX_REPR = 200

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
    """True if the JSON contains no part of an element."""


def make_codec(space: AnySpace, path: str) -> SpaceCodec:
    """Return the codec of a space.

    Args:
        path: name of the field, and of its tensor.

    Raises:
        ConfigError: the kind of space is not supported.
    """
    for kind, make in _CODECS.items():
        if isinstance(space, kind):
            return make(space, path)
    if _is_text(space):
        return SpaceCodec(str, str, lambda element, tensors: str(element))
    raise ConfigError(
        f"unsupported space {space} for '{path}'; use one of"
        f" {', '.join(kind.__name__ for kind in _CODECS)} or a space of text, or wrap the"
        " environment so that it has one of them"
    )


def _is_text(space: AnySpace) -> bool:
    try:
        return isinstance(space.sample(), str)
    except Exception:  # noqa: BLE001 - third-party code may raise anything
        return False


def json_safe(value: Any) -> Any:
    """Convert a value to plain JSON; a value without a JSON form becomes a short text."""
    if isinstance(value, np.ndarray) and value.size > MAX_LISTED_ELEMENTS:
        return f"array of shape {value.shape}, {value.dtype}"
    if isinstance(value, np.ndarray | np.generic):
        return json_safe(value.tolist())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_safe(item) for item in value]
    return repr(value)[:_MAX_REPR]


def _discrete_codec(space: spaces.Discrete, path: str) -> SpaceCodec:
    min_value, max_value = int(space.start), int(space.start + space.n - 1)
    return SpaceCodec(
        Annotated[int, Field(ge=min_value, le=max_value)],
        lambda value: space.dtype.type(value),
        lambda element, tensors: int(element),
    )


def _box_codec(space: spaces.Box, path: str) -> SpaceCodec:
    if int(np.prod(space.shape)) > MAX_LISTED_ELEMENTS:
        return _tensor_codec(space, path)
    kind = int if np.issubdtype(space.dtype, np.integer) else float
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    return _list_codec(space, kind, low, high)


def _tensor_codec(space: spaces.Box, path: str) -> SpaceCodec:
    description = f"separate tensor '{path}', {space.dtype}, shape {list(space.shape)}"

    def encode(element: Any, tensors: Tensors) -> None:
        tensors[path] = np.asarray(element, dtype=space.dtype)

    def refuse(value: Any) -> Any:
        raise IllegalActionError(f"a value for {space} is too large for JSON")

    annotation = Annotated[_Tensor | None, Field(description=description)]
    return SpaceCodec(annotation, refuse, encode, is_tensor=True)


def _multi_discrete_codec(space: spaces.MultiDiscrete, path: str) -> SpaceCodec:
    start = np.asarray(space.start, dtype=np.float64)
    return _list_codec(space, int, start, start + np.asarray(space.nvec, dtype=np.float64) - 1)


def _multi_binary_codec(space: spaces.MultiBinary, path: str) -> SpaceCodec:
    zeros = np.zeros(space.shape)
    return _list_codec(space, int, zeros, zeros + 1)


def _list_codec(
    space: spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary,
    kind: type[int] | type[float],
    low: np.ndarray,
    high: np.ndarray,
) -> SpaceCodec:
    """Return the codec for numbers in nested lists with the space's shape."""

    def make_bounded(minimum: float, maximum: float) -> Any:
        bounds: JsonObject = {"allow_inf_nan": False} if kind is float else {}
        if np.isfinite(minimum):
            bounds["ge"] = kind(minimum)
        if np.isfinite(maximum):
            bounds["le"] = kind(maximum)
        return Annotated[kind, Field(**bounds)]

    annotation: Any
    is_uniform = low.size == 0 or (
        np.ptp(_limit_bounds(low)) == 0 and np.ptp(_limit_bounds(high)) == 0
    )
    if not is_uniform and low.ndim == 1 and low.size <= _MAX_SEPARATE_BOUNDS:
        types = tuple(make_bounded(*pair) for pair in zip(low, high, strict=True))
        annotation = tuple.__class_getitem__(types)
    else:
        annotation = make_bounded(low.min(), high.max()) if low.size else kind
        for length in reversed(low.shape):
            annotation = Annotated[list[annotation], Field(min_length=length, max_length=length)]
    return SpaceCodec(
        annotation,
        lambda value: np.asarray(value, dtype=space.dtype),
        lambda element, tensors: np.asarray(element).tolist(),
    )


def _limit_bounds(bounds: np.ndarray) -> np.ndarray:
    # The difference of two infinities is NaN.
    return np.asarray(np.nan_to_num(bounds, posinf=1e300, neginf=-1e300) / 2)


def _text_codec(space: spaces.Text, path: str) -> SpaceCodec:
    limits = Field(min_length=space.min_length, max_length=space.max_length)
    return SpaceCodec(Annotated[str, limits], str, lambda element, tensors: str(element))


def _tuple_codec(space: spaces.Tuple[Any], path: str) -> SpaceCodec:
    codecs = [make_codec(part, f"{path}.{index}") for index, part in enumerate(space.spaces)]
    return SpaceCodec(
        tuple.__class_getitem__(tuple(codec.annotation for codec in codecs)),
        lambda value: tuple(c.decode(v) for c, v in zip(codecs, value, strict=True)),
        lambda element, tensors: [
            c.encode(e, tensors) for c, e in zip(codecs, element, strict=True)
        ],
    )


def _dict_codec(space: spaces.Dict, path: str) -> SpaceCodec:
    codecs = {str(name): make_codec(part, f"{path}.{name}") for name, part in space.spaces.items()}
    fields = TypedDict(  # type: ignore[misc]
        f"{path.rpartition('.')[2].title()}Fields",
        {name: codec.annotation for name, codec in codecs.items()},
    )
    return SpaceCodec(
        with_config(ConfigDict(extra="forbid"))(fields),
        lambda value: {name: codec.decode(value[name]) for name, codec in codecs.items()},
        lambda element, tensors: {
            name: codec.encode(element[name], tensors) for name, codec in codecs.items()
        },
    )


def _sequence_codec(space: spaces.Sequence, path: str) -> SpaceCodec:
    codec = make_codec(space.feature_space, path)
    return SpaceCodec(
        list[codec.annotation],  # type: ignore[name-defined]
        lambda value: tuple(codec.decode(item) for item in value),
        lambda element, tensors: [codec.encode(item, tensors) for item in element],
    )


_CODECS: dict[type[AnySpace], Callable[[Any, str], SpaceCodec]] = {
    spaces.Discrete: _discrete_codec,
    spaces.Box: _box_codec,
    spaces.MultiDiscrete: _multi_discrete_codec,
    spaces.MultiBinary: _multi_binary_codec,
    spaces.Text: _text_codec,
    spaces.Tuple: _tuple_codec,
    spaces.Dict: _dict_codec,
    spaces.Sequence: _sequence_codec,
}
