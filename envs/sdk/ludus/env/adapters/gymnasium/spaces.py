"""Gymnasium's spaces as JSON: the type of a field, and values both ways.

    space --codec_of--> SpaceCodec: annotation (what pydantic checks and the schema says),
                                    decode (JSON to an element), encode (an element to JSON)

Boxes with more than `MAX_LISTED_ELEMENTS` elements, such as images, are no JSON: their
field is null, and the array travels beside the observation under the field's path. Where a
client knows nothing of such arrays, the field is an object with shape, dtype and data.
A kind of space that is not Gymnasium's own is text where its samples are.
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
"""Larger boxes travel as tensors."""
_MAX_SEPARATE_BOUNDS = 64
_MAX_REPR = 200

Tensors = dict[str, np.ndarray]


class _Tensor(TypedDict):
    """An array as JSON."""

    dtype: str
    shape: list[int]
    data: str
    """Its bytes in C order, little endian, in base64."""


AnySpace = spaces.Space[Any]


@dataclass(frozen=True, slots=True)
class SpaceCodec:
    """How the elements of one space are written as JSON."""

    annotation: Any
    decode: Callable[[Any], Any]
    """An element of what JSON gave; whether it lies in the space is for the space to say."""
    encode: Callable[[Any, Tensors], Any]
    """JSON of an element; what is too large for it is put into the tensors."""
    is_tensor: bool = False
    """True where nothing of an element is in the JSON."""


def codec_of(space: AnySpace, path: str) -> SpaceCodec:
    """How the space's elements are written.

    Args:
        path: the field's name; tensors are called so.

    Raises:
        ConfigError: a kind of space that has no JSON form here.
    """
    for kind, make in _CODECS.items():
        if isinstance(space, kind):
            return make(space, path)
    if _is_text(space):
        return SpaceCodec(str, str, lambda element, tensors: str(element))
    raise ConfigError(
        f"expected spaces out of {', '.join(kind.__name__ for kind in _CODECS)}, or of text, got"
        f" {space} for"
        f" '{path}'; wrap the environment so that it has one of these"
    )


def _is_text(space: AnySpace) -> bool:
    try:
        return isinstance(space.sample(), str)
    except Exception:  # noqa: BLE001 - foreign code: then it is no text that could be had
        return False


def json_safe(value: Any) -> Any:
    """The value as plain JSON; what has no JSON form becomes its (short) text."""
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


def _discrete(space: spaces.Discrete, path: str) -> SpaceCodec:
    first, last = int(space.start), int(space.start + space.n - 1)
    return SpaceCodec(
        Annotated[int, Field(ge=first, le=last)],
        lambda value: space.dtype.type(value),  # type: ignore[union-attr]
        lambda element, tensors: int(element),
    )


def _box(space: spaces.Box, path: str) -> SpaceCodec:
    if int(np.prod(space.shape)) > MAX_LISTED_ELEMENTS:
        return _tensor(space, path)
    kind = int if np.issubdtype(space.dtype, np.integer) else float
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    return _listed(space, kind, low, high)


def _tensor(space: spaces.Box, path: str) -> SpaceCodec:
    said = f"beside the JSON: tensor '{path}', {space.dtype}, shape {list(space.shape)}"

    def encode(element: Any, tensors: Tensors) -> None:
        tensors[path] = np.asarray(element, dtype=space.dtype)

    def refuse(value: Any) -> Any:
        raise IllegalActionError(f"expected no value for {space}, which is too large for JSON")

    annotation = Annotated[_Tensor | None, Field(description=said)]
    return SpaceCodec(annotation, refuse, encode, is_tensor=True)


def _multi_discrete(space: spaces.MultiDiscrete, path: str) -> SpaceCodec:
    start = np.asarray(space.start, dtype=np.float64)
    return _listed(space, int, start, start + np.asarray(space.nvec, dtype=np.float64) - 1)


def _multi_binary(space: spaces.MultiBinary, path: str) -> SpaceCodec:
    zeros = np.zeros(space.shape)
    return _listed(space, int, zeros, zeros + 1)


def _listed(
    space: spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary,
    kind: type[int] | type[float],
    low: np.ndarray,
    high: np.ndarray,
) -> SpaceCodec:
    """Numbers in nested lists of the space's shape."""

    def bounded(lowest: float, highest: float) -> Any:
        bounds: JsonObject = {"allow_inf_nan": False} if kind is float else {}
        if np.isfinite(lowest):
            bounds["ge"] = kind(lowest)
        if np.isfinite(highest):
            bounds["le"] = kind(highest)
        return Annotated[kind, Field(**bounds)]

    annotation: Any
    are_alike = low.size == 0 or (np.ptp(_finite(low)) == 0 and np.ptp(_finite(high)) == 0)
    if not are_alike and low.ndim == 1 and low.size <= _MAX_SEPARATE_BOUNDS:
        each = tuple(bounded(*pair) for pair in zip(low, high, strict=True))
        annotation = tuple.__class_getitem__(each)
    else:
        annotation = bounded(low.min(), high.max()) if low.size else kind
        for length in reversed(low.shape):
            annotation = Annotated[list[annotation], Field(min_length=length, max_length=length)]
    return SpaceCodec(
        annotation,
        lambda value: np.asarray(value, dtype=space.dtype),
        lambda element, tensors: np.asarray(element).tolist(),
    )


def _finite(bounds: np.ndarray) -> np.ndarray:
    # Infinities differ from themselves when subtracted.
    return np.nan_to_num(bounds, posinf=1e300, neginf=-1e300) / 2


def _text(space: spaces.Text, path: str) -> SpaceCodec:
    limits = Field(min_length=space.min_length, max_length=space.max_length)
    return SpaceCodec(Annotated[str, limits], str, lambda element, tensors: str(element))


def _tuple(space: spaces.Tuple, path: str) -> SpaceCodec:
    codecs = [codec_of(part, f"{path}.{index}") for index, part in enumerate(space.spaces)]
    return SpaceCodec(
        tuple.__class_getitem__(tuple(codec.annotation for codec in codecs)),
        lambda value: tuple(c.decode(v) for c, v in zip(codecs, value, strict=True)),
        lambda element, tensors: [
            c.encode(e, tensors) for c, e in zip(codecs, element, strict=True)
        ],
    )


def _dict(space: spaces.Dict, path: str) -> SpaceCodec:
    codecs = {str(name): codec_of(part, f"{path}.{name}") for name, part in space.spaces.items()}
    fields = TypedDict(  # type: ignore[operator, misc]
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


def _sequence(space: spaces.Sequence, path: str) -> SpaceCodec:
    codec = codec_of(space.feature_space, path)
    return SpaceCodec(
        list[codec.annotation],  # type: ignore[name-defined]
        lambda value: tuple(codec.decode(item) for item in value),
        lambda element, tensors: [codec.encode(item, tensors) for item in element],
    )


_CODECS: dict[type[AnySpace], Callable[[Any, str], SpaceCodec]] = {
    spaces.Discrete: _discrete,
    spaces.Box: _box,
    spaces.MultiDiscrete: _multi_discrete,
    spaces.MultiBinary: _multi_binary,
    spaces.Text: _text,
    spaces.Tuple: _tuple,
    spaces.Dict: _dict,
    spaces.Sequence: _sequence,
}
