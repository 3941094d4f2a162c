"""Payloads are converted without loss, and other data is refused."""

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
from ludus.trainer.weights.payload import (
    Payload,
    apply_delta,
    decode_difference,
    decode_payload,
    encode_difference,
    encode_payload,
)
from tests.weights.states import assert_same, make_state

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def make_random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bits, including NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    end_value = 2 if dtype == torch.bool else 256
    raw_bytes = torch.randint(0, end_value, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw_bytes.view(dtype).reshape(shape)


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the raw bytes of a tensor, because NaN is not equal to NaN."""
    return tensor.reshape(-1).view(torch.uint8)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=6))
def test_payload_preserves_tensors_of_any_dtype_and_shape(
    layout: list[tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    parts = {
        f"t{index}": make_random_tensor(*spec, seed=index) for index, spec in enumerate(layout)
    }
    buffers = encode_payload(Payload(7, "hash", "parent", parts))
    for received_buffers in (buffers, [np.concatenate(buffers)]):
        payload = decode_payload(received_buffers)
        assert (payload.version, payload.content_hash, payload.parent_hash) == (7, "hash", "parent")
        for name, tensor in parts.items():
            assert payload.parts[name].dtype == tensor.dtype
            assert payload.parts[name].shape == tensor.shape
            assert torch.equal(view_bytes(payload.parts[name]), view_bytes(tensor))


@given(st.sampled_from(DTYPES), SHAPES, st.integers(0, 99), st.integers(0, 99))
def test_applying_the_difference_reproduces_the_new_tensor(
    dtype: torch.dtype, shape: tuple[int, ...], old_seed: int, new_seed: int
) -> None:
    old_tensor, new_tensor = (
        make_random_tensor(dtype, shape, old_seed),
        make_random_tensor(dtype, shape, new_seed),
    )
    decoded_tensor = decode_difference(old_tensor, encode_difference(old_tensor, new_tensor))
    assert decoded_tensor.dtype == dtype
    assert decoded_tensor.shape == new_tensor.shape
    assert torch.equal(view_bytes(decoded_tensor), view_bytes(new_tensor))


def make_delta(old_version: int, new_version: int) -> Payload:
    """Return the difference between two versions."""
    old_state, new_state = make_state(old_version), make_state(new_version)
    parts = {name: encode_difference(old_state[name], new_state[name]) for name in old_state}
    return Payload(new_version, f"hash {new_version}", f"hash {old_version}", parts)


def test_difference_applies_only_to_the_parent_version() -> None:
    delta = make_delta(1, 2)
    state = apply_delta(make_state(1), "hash 1", delta)
    assert_same(state, make_state(2))
    for wrong_hash in ("hash 2", "hash 0"):
        with pytest.raises(
            WeightSyncError, match=f"difference from hash 1 and cannot be applied to {wrong_hash}"
        ):
            apply_delta(state, wrong_hash, delta)


def test_difference_for_wrong_size_or_missing_tensor_is_refused() -> None:
    delta = make_delta(1, 2)
    smaller_state = {**make_state(1), "matrix": torch.ones(5, 6)}
    with pytest.raises(WeightSyncError, match=r"'matrix'.*has 140 bytes, the tensor has 120"):
        apply_delta(smaller_state, "hash 1", delta)
    partial_state = {name: tensor for name, tensor in make_state(1).items() if name != "half"}
    with pytest.raises(WeightSyncError, match=r"'half' cannot be applied"):
        apply_delta(partial_state, "hash 1", delta)


def test_oversized_frame_is_refused_before_decompression() -> None:
    old_tensor = torch.zeros(8)
    compressed_zeros = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    frame = torch.frombuffer(bytearray(compressed_zeros), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"has {1 << 28} bytes, the tensor has 32"):
        decode_difference(old_tensor, frame)


def test_frame_without_a_size_is_refused() -> None:
    old_tensor = torch.zeros(8)
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=False)
    sizeless_frame = torch.frombuffer(
        bytearray(compressor.compress(bytes(1 << 20))), dtype=torch.uint8
    )
    zlib_frame = torch.frombuffer(bytearray(zlib.compress(bytes(32))), dtype=torch.uint8)
    for frame in (sizeless_frame, zlib_frame):
        with pytest.raises((ValueError, zstandard.ZstdError)):
            decode_difference(old_tensor, frame)


def make_file(header: object, body: bytes = b"") -> list[np.ndarray]:
    """Return a file with this header."""
    header_bytes = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return [
        np.frombuffer(len(header_bytes).to_bytes(8, "little") + header_bytes + body, dtype=np.uint8)
    ]


METADATA = {"version": "1", "content_hash": "x"}


@pytest.mark.parametrize(
    "broken",
    [
        [np.zeros(0, dtype=np.uint8)],
        [np.zeros(8, dtype=np.uint8)],
        [np.full(64, 255, dtype=np.uint8)],
        make_file(b"not json"),
        make_file([]),
        make_file({}),
        make_file({"__metadata__": {"version": "one", "content_hash": "x"}}),
        make_file({"__metadata__": METADATA, "w": {"dtype": "F32", "shape": [2]}}),
        make_file(
            {"__metadata__": METADATA, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        ),
        make_file(
            {"__metadata__": METADATA, "w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 8]}},
            bytes(8),
        ),
        make_file(
            {"__metadata__": METADATA, "w": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}},
            bytes(8),
        ),
        make_file(
            {"__metadata__": METADATA, "w": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}},
            bytes(8),
        ),
    ],
)
def test_invalid_payload_is_refused(broken: list[np.ndarray]) -> None:
    with pytest.raises(WeightSyncError, match="are not a complete safetensors file"):
        decode_payload(broken)
