"""Payloads survive the trip, and nothing that is not a payload is taken for one."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ludus.proto.errors import WeightSyncError
from ludus.trainer.weights.delta import apply_delta, decode_difference, encode_difference
from ludus.trainer.weights.payload import Payload, from_buffers, to_buffers
from tests.weights.states import assert_same, make_state

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of any bits, so of nan and infinity, too."""
    noise = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=noise)
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its raw bytes: nan is not equal to itself, its bits are."""
    return tensor.reshape(-1).view(torch.uint8)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=6))
def test_tensors_of_any_type_and_shape_come_back_bit_for_bit(
    layout: list[tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    parts = {f"t{i}": random_tensor(*of, seed=i) for i, of in enumerate(layout)}
    buffers = to_buffers(Payload(7, "own", "parent", parts))
    for carried in (buffers, [np.concatenate(buffers)]):
        payload = from_buffers(carried)
        assert (payload.version, payload.content_hash, payload.parent_hash) == (7, "own", "parent")
        for name, tensor in parts.items():
            assert payload.parts[name].dtype == tensor.dtype
            assert payload.parts[name].shape == tensor.shape
            assert torch.equal(bits(payload.parts[name]), bits(tensor))


@given(st.sampled_from(DTYPES), SHAPES, st.integers(0, 99), st.integers(0, 99))
def test_a_difference_leads_from_one_tensor_to_the_other(
    dtype: torch.dtype, shape: tuple[int, ...], first: int, second: int
) -> None:
    old, new = random_tensor(dtype, shape, first), random_tensor(dtype, shape, second)
    decoded = decode_difference(old, encode_difference(old, new))
    assert decoded.dtype == dtype
    assert decoded.shape == new.shape
    assert torch.equal(bits(decoded), bits(new))


def delta_between(old: int, new: int) -> Payload:
    """What turns one state into another."""
    before, after = make_state(old), make_state(new)
    parts = {name: encode_difference(before[name], after[name]) for name in before}
    return Payload(new, f"hash {new}", f"hash {old}", parts)


def test_a_difference_is_applied_once_and_to_its_parent_only() -> None:
    delta = delta_between(1, 2)
    once = apply_delta(make_state(1), "hash 1", delta)
    assert_same(once, make_state(2))
    for wrong in ("hash 2", "hash 0"):
        with pytest.raises(WeightSyncError, match=f"difference from hash 1, got weights {wrong}"):
            apply_delta(once, wrong, delta)


def test_a_difference_of_another_size_or_of_an_unknown_tensor_is_refused() -> None:
    delta = delta_between(1, 2)
    smaller = {**make_state(1), "matrix": torch.ones(5, 6)}
    with pytest.raises(WeightSyncError, match=r"'matrix'.*of 140 bytes, the tensor has 120"):
        apply_delta(smaller, "hash 1", delta)
    fewer = {name: tensor for name, tensor in make_state(1).items() if name != "half"}
    with pytest.raises(WeightSyncError, match=r"'half' cannot be applied"):
        apply_delta(fewer, "hash 1", delta)


def test_a_frame_that_claims_to_be_huge_takes_no_memory() -> None:
    old = torch.zeros(8)
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    frame = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"of {1 << 28} bytes, the tensor has 32"):
        decode_difference(old, frame)


def test_a_frame_that_hides_its_size_is_refused() -> None:
    old = torch.zeros(8)
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=False)
    hidden = torch.frombuffer(bytearray(compressor.compress(bytes(1 << 20))), dtype=torch.uint8)
    garbage = torch.frombuffer(bytearray(zlib.compress(bytes(32))), dtype=torch.uint8)
    for frame in (hidden, garbage):
        with pytest.raises((ValueError, zstandard.ZstdError)):
            decode_difference(old, frame)


def file_of(header: object, data: bytes = b"") -> list[np.ndarray]:
    """A file with this header."""
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return [np.frombuffer(len(text).to_bytes(8, "little") + text + data, dtype=np.uint8)]


METADATA = {"version": "1", "content_hash": "x"}


@pytest.mark.parametrize(
    "broken",
    [
        [np.zeros(0, dtype=np.uint8)],
        [np.zeros(8, dtype=np.uint8)],
        [np.full(64, 255, dtype=np.uint8)],
        file_of(b"not json"),
        file_of([]),
        file_of({}),
        file_of({"__metadata__": {"version": "one", "content_hash": "x"}}),
        file_of({"__metadata__": METADATA, "w": {"dtype": "F32", "shape": [2]}}),
        file_of(
            {"__metadata__": METADATA, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        ),
        file_of(
            {"__metadata__": METADATA, "w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 8]}},
            bytes(8),
        ),
        file_of(
            {"__metadata__": METADATA, "w": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}},
            bytes(8),
        ),
        file_of(
            {"__metadata__": METADATA, "w": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}},
            bytes(8),
        ),
    ],
)
def test_what_is_no_payload_is_refused_in_words(broken: list[np.ndarray]) -> None:
    with pytest.raises(WeightSyncError, match="expected a whole safetensors file"):
        from_buffers(broken)
