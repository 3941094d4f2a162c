"""Weights in a folder: complete, unaltered, and no older than wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ludus.proto.errors import WeightSyncError
from ludus.trainer.interfaces import PublishedWeights, StateDict
from ludus.trainer.types import Probe
from ludus.trainer.weights import FolderStore, make_manifest

PROBE = Probe([1, 2], [3])


def make_state(version: int) -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes that differ between versions."""
    noise = torch.Generator().manual_seed(version)
    return {
        "matrix": torch.randn(5, 7, generator=noise),
        "half": torch.randn(6, generator=noise).to(torch.bfloat16),
        "scalar": torch.tensor(float(version)),
        # A view: its elements do not lie in row-major order.
        "transposed": torch.randn(4, 3, generator=noise).T,
    }


def publish(store: FolderStore, version: int, state: StateDict | None = None) -> PublishedWeights:
    state = make_state(version) if state is None else state
    return store.publish(make_manifest(version, state, PROBE, [-1.0]), state)


def weights_file(published: PublishedWeights) -> Path:
    return Path(published.location) / "weights.safetensors"


def test_a_version_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    fetched = store.fetch(publish(store, 3))
    state = make_state(3)
    assert fetched.keys() == state.keys()
    for name, tensor in state.items():
        assert fetched[name].dtype == tensor.dtype
        assert torch.equal(fetched[name], tensor)


def test_another_process_of_the_same_folder_can_fetch(tmp_path: Path) -> None:
    published = publish(FolderStore(tmp_path), 1)
    assert FolderStore(tmp_path).fetch(published)["scalar"] == 1.0


def test_versions_of_a_later_step_give_way_when_a_run_goes_on_from_before(tmp_path: Path) -> None:
    for version in (7, 8, 9):
        publish(FolderStore(tmp_path), version)
    store = FolderStore(tmp_path)
    assert store.fetch(publish(store, 5))["scalar"] == 5.0
    assert [path.name for path in tmp_path.iterdir()] == ["v00000005"]


def test_only_the_newest_versions_stay(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, keep_versions=2)
    published = [publish(store, version) for version in range(9, 13)]
    assert [store.fetch(p)["scalar"].item() for p in published[2:]] == [11.0, 12.0]
    for dropped in published[:2]:
        with pytest.raises(WeightSyncError, match="cannot be read"):
            store.fetch(dropped)


def test_a_version_published_again_replaces_the_first(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    publish(store, 5)
    again = publish(store, 5, make_state(50))
    assert store.fetch(again)["scalar"] == 50.0


def test_what_a_crash_left_half_written_is_overwritten_and_never_counted(tmp_path: Path) -> None:
    left = tmp_path / "v00000007.partial"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"half")
    store = FolderStore(tmp_path, keep_versions=2)
    published = [publish(store, version) for version in (5, 6, 7)]
    assert not left.exists()
    assert [store.fetch(p)["scalar"].item() for p in published[1:]] == [6.0, 7.0]


@pytest.mark.parametrize("position", [-1, -40])
def test_one_altered_byte_is_found(tmp_path: Path, position: int) -> None:
    store = FolderStore(tmp_path)
    published = publish(store, 1)
    content = bytearray(weights_file(published).read_bytes())
    content[position] ^= 1
    weights_file(published).write_bytes(content)
    with pytest.raises(WeightSyncError, match="arrived altered"):
        store.fetch(published)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, share: float) -> None:
    store = FolderStore(tmp_path)
    published = publish(store, 1)
    content = weights_file(published).read_bytes()
    weights_file(published).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(WeightSyncError, match=r"version 1 cannot be read.*weights\.path"):
        store.fetch(published)


def test_weights_that_are_not_those_of_the_manifest_are_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    published = publish(store, 1)
    fewer = {name: tensor for name, tensor in make_state(1).items() if name != "matrix"}
    other = publish(FolderStore(tmp_path / "other"), 1, fewer)
    with pytest.raises(WeightSyncError, match="matrix"):
        store.fetch(PublishedWeights(published.manifest, other.location))


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    state = make_state(1)
    manifest = make_manifest(1, state, PROBE, [-1.0])
    reshaped = {**state, "matrix": state["matrix"].reshape(7, 5)}
    store = FolderStore(tmp_path)
    with pytest.raises(WeightSyncError, match=r"'matrix' arrived altered.*\(7, 5\)"):
        store.fetch(store.publish(manifest, reshaped))


def test_the_content_hash_tells_versions_apart() -> None:
    hashes = [make_manifest(1, make_state(seed), PROBE, [-1.0]).content_hash for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]
