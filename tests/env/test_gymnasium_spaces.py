"""The schema, the sampler and the space of an action accept the same values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import orjson
import pytest
from gymnasium import spaces
from pydantic import ValidationError, create_model

from ludus.env import Action
from ludus.env.adapters.gymnasium.spaces import make_codec
from ludus.env.contract.schema import draw_value, find_fault
from ludus.proto.errors import IllegalActionError

NUM_SPACES, NUM_ELEMENTS, MAX_DEPTH = 150, 6, 2
CHARACTERS = "aZ0 -]^\\[.*$\n\tß漢🙂"


def make_box(generator: random.Random, shape: tuple[int, ...]) -> spaces.Space[Any]:
    dtype: Any = generator.choice(["f2", "f4", "f8", "i1", "u1", "i4", "i8", "u8", "bool"])
    if dtype == "bool":
        return spaces.Box(0, 1, shape, dtype=np.bool_)
    if dtype.startswith("f"):
        bounds = [[0.1, 0.7], [-np.inf, 0.3], [-1e-3, np.inf], [-np.inf, np.inf], [-6e4, 6e4]]
        pairs = [generator.choice(bounds) for _ in range(int(np.prod(shape)))]
    else:
        info = np.iinfo(dtype)
        limits = [[info.min, info.max], [0, 3], [info.max - 1, info.max], [info.min, info.min + 1]]
        pairs = [generator.choice(limits) for _ in range(int(np.prod(shape)))]
    array = np.array(pairs, dtype=dtype).reshape(*shape, 2)
    return spaces.Box(array[..., 0], array[..., 1], dtype=dtype)


def make_space(generator: random.Random, depth: int = 0) -> spaces.Space[Any]:
    """Return a random space of any supported class."""
    shape = tuple(generator.randint(1, 3) for _ in range(generator.randint(1, 3)))
    kinds = ["discrete", "multi_discrete", "multi_binary", "text", "box"]
    kinds += ["tuple", "dict", "sequence", "one_of"] * (depth < MAX_DEPTH)
    match generator.choice(kinds):
        case "discrete":
            return spaces.Discrete(generator.randint(1, 4), start=generator.randint(-9, 9))
        case "multi_discrete":
            sizes = np.array([generator.randint(1, 4) for _ in range(np.prod(shape))])
            starts = np.array([generator.randint(-9, 9) for _ in range(np.prod(shape))])
            return spaces.MultiDiscrete(sizes.reshape(shape), start=starts.reshape(shape))
        case "multi_binary":
            return spaces.MultiBinary(generator.choice([shape, shape[0]]))
        case "text":
            characters = "".join(generator.sample(CHARACTERS, generator.randint(1, 8)))
            return spaces.Text(generator.randint(2, 5), min_length=1, charset=characters)
        case "box":
            return make_box(generator, generator.choice([shape, ()]))
        case "tuple":
            return spaces.Tuple([make_space(generator, depth + 1) for _ in shape])
        case "dict":
            return spaces.Dict({f"k-{key}": make_space(generator, depth + 1) for key in "ab"})
        case "sequence":
            return spaces.Sequence(make_space(generator, depth + 1))
    return spaces.OneOf([make_space(generator, depth + 1) for _ in "ab"])


EDGE_SPACES = [
    spaces.MultiDiscrete([[2, 3], [4, 2]]),
    spaces.Box(np.float32(0.1), np.float32(0.7), (2,)),
    spaces.Box(-np.finfo("f8").max, np.finfo("f8").max, (2,), np.float64),
    spaces.Discrete(3, start=2**62),
    spaces.MultiDiscrete([3, *[2] * 99]),
    spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    spaces.Sequence(spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Discrete(2)), stack=True),
    spaces.Dict({1: spaces.Discrete(2), 2: spaces.Discrete(3)}),  # type: ignore[dict-item]
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Casting input x")
@pytest.mark.parametrize("part", range(5))
def test_schema_sampler_and_space_agree(part: int) -> None:
    generator = random.Random(part)
    random_spaces = [make_space(generator) for _ in range(NUM_SPACES // 5)]
    for space in EDGE_SPACES * (part == 0) + random_spaces:
        check_space(space, generator)


def check_space(space: spaces.Space[Any], generator: random.Random) -> None:
    codec = make_codec(space, "action")
    action_type = create_model("SpaceAction", __base__=Action, action=codec.annotation)
    schema = action_type.model_json_schema()
    space.seed(generator.randrange(1000))
    for _ in range(NUM_ELEMENTS):
        drawn = orjson.loads(orjson.dumps(draw_value(schema, generator)))
        assert find_fault(drawn, schema) == "", space
        element = codec.decode(dict(action_type.model_validate(drawn))["action"])
        assert element in space, (space, drawn)
        try:
            with np.errstate(all="ignore"):
                sample = space.sample()
        except (OverflowError, ValueError):  # Gymnasium cannot sample from such bounds
            continue
        encoded = orjson.loads(orjson.dumps({"action": codec.encode(sample, {})}))
        if "Infinity" in repr(encoded) or encoded != encoded:
            continue
        assert find_fault(encoded, schema) == "", (space, sample)
        decoded = codec.decode(dict(action_type.model_validate(encoded))["action"])
        assert decoded in space, (space, sample)
        assert codec.encode(decoded, {}) == codec.encode(sample, {})


@pytest.mark.parametrize(
    ("space", "element"),
    [
        (spaces.Box(np.float32(0.1), np.float32(0.7), (2,)), [0.1, 0.7]),
        (spaces.Box(np.float16(0.1), np.float16(0.7), (1,), np.float16), [0.7]),
    ],
)
def test_decimals_of_the_bounds_are_actions_and_observations(
    space: spaces.Space[Any], element: list[float]
) -> None:
    codec = make_codec(space, "observation")
    value_type = create_model("Value", value=codec.annotation)
    for encoded in (element, codec.encode(element, {}), codec.encode(np.array(element), {})):
        decoded = codec.decode(value_type(value=encoded).value)  # type: ignore[attr-defined]
        assert decoded in space


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Text(3, charset="ab-"), "abc"),
        (spaces.MultiDiscrete([[2, 3], [4, 2]]), [[2, 0], [0, 0]]),
        (spaces.Box(0, 2**63 - 1, (1,), np.int64), [2**63]),
        (spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]), [0, 2]),
    ],
)
def test_value_outside_the_space_does_not_fit_the_schema(
    space: spaces.Space[Any], value: Any
) -> None:
    value_type = create_model("Value", value=make_codec(space, "action").annotation)
    with pytest.raises(ValidationError):
        value_type(value=value)


def test_number_beyond_the_type_of_an_unbounded_box_is_illegal() -> None:
    codec = make_codec(spaces.Box(-np.inf, np.inf, (1,)), "action")
    with pytest.raises(IllegalActionError, match="float32"):
        codec.decode([1e39])
