"""Weights in a folder are complete and undamaged, and old versions are deleted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.weights.folder import FolderStorage
from ludus.trainer.weights.store import VersionStore
from tests.weights.states import assert_same, make_settings, make_state, publish


def open_store(folder: Path, **fields: float) -> VersionStore:
    """Return a store in the folder."""
    return VersionStore(FolderStorage(folder), make_settings(**fields))


def get_weights_file(folder: Path, weights: PublishedWeights) -> Path:
    """Return the file of the newest payload."""
    return folder / str(weights.payloads[-1].location)


def test_fetched_version_equals_the_published_weights(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert_same(store.fetch(publish(store, 3)).state, make_state(3))


def test_complete_version_is_a_readable_safetensors_file(tmp_path: Path) -> None:
    weights = publish(open_store(tmp_path), 3)
    assert_same(load_file(get_weights_file(tmp_path, weights)), make_state(3))


def test_another_store_can_fetch_from_the_same_folder(tmp_path: Path) -> None:
    learner = open_store(tmp_path, full_every=3)
    versions = [publish(learner, version) for version in (1, 2)]
    assert_same(open_store(tmp_path).fetch(versions[1]).state, make_state(2))


def test_resumed_run_deletes_later_versions(tmp_path: Path) -> None:
    for version in (7, 8, 9):
        publish(open_store(tmp_path), version)
    store = open_store(tmp_path)
    weights = publish(store, 5)
    assert_same(store.fetch(weights).state, make_state(5))
    assert list(tmp_path.iterdir()) == [get_weights_file(tmp_path, weights)]


def test_unrelated_files_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "videos.txt").write_text("text")
    (tmp_path / "v1").mkdir()
    publish(open_store(tmp_path), 5)
    assert (tmp_path / "videos.txt").exists()
    assert (tmp_path / "v1").exists()


def test_only_the_newest_versions_are_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path, keep_versions=2)
    versions = [publish(store, version) for version in range(9, 13)]
    for version, weights in zip((11, 12), versions[2:], strict=True):
        assert_same(store.fetch(weights).state, make_state(version))
    for deleted_weights in versions[:2]:
        with pytest.raises(WeightSyncError, match=r"has no .v0000.*keep_versions"):
            store.fetch(deleted_weights)


def test_version_published_twice_is_replaced(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish(store, 5)
    second_weights = publish(store, 5, make_state(50))
    assert_same(store.fetch(second_weights).state, make_state(50))


def test_partial_file_left_by_a_crash_is_deleted(tmp_path: Path) -> None:
    partial_file = tmp_path / "v00000007-0123456789ab.safetensors.partial"
    partial_file.write_bytes(b"half")
    store = open_store(tmp_path, keep_versions=2)
    versions = [publish(store, version) for version in (5, 6, 7)]
    assert not partial_file.exists()
    for version, weights in zip((6, 7), versions[1:], strict=True):
        assert_same(store.fetch(weights).state, make_state(version))


@pytest.mark.parametrize("position", [-1, -40])
def test_one_changed_byte_is_detected(tmp_path: Path, position: int) -> None:
    store = open_store(tmp_path)
    weights = publish(store, 1)
    content = bytearray(get_weights_file(tmp_path, weights).read_bytes())
    content[position] ^= 1
    get_weights_file(tmp_path, weights).write_bytes(content)
    with pytest.raises(WeightSyncError, match="arrived altered"):
        store.fetch(weights)


@pytest.mark.parametrize("kept_fraction", [0.0, 0.5, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, kept_fraction: float) -> None:
    store = open_store(tmp_path)
    weights = publish(store, 1)
    content = get_weights_file(tmp_path, weights).read_bytes()
    get_weights_file(tmp_path, weights).write_bytes(content[: int(len(content) * kept_fraction)])
    with pytest.raises(WeightSyncError, match=r"has \d+ bytes instead of \d+.*weights\.path"):
        store.fetch(weights)


@pytest.mark.slow
def test_publish_and_fetch_succeed_despite_a_briefly_missing_folder(tmp_path: Path) -> None:
    folder, moved_folder = tmp_path / "weights", tmp_path / "moved"
    store = open_store(folder, timeout_s=120.0)
    publish(store, 1)
    for operation in (lambda: publish(store, 2), lambda: store.fetch(publish(store, 3))):
        folder.rename(moved_folder)
        timer = threading.Timer(0.3, lambda: moved_folder.rename(folder))
        timer.start()
        operation()
        timer.join()


def test_failed_deletion_is_retried_after_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, moved_folder = tmp_path / "weights", tmp_path / "moved"
    storage = FolderStorage(folder)
    drop = storage.drop

    def drop_without_folder(location: str) -> None:
        folder.rename(moved_folder)
        try:
            drop(location)
        finally:
            moved_folder.rename(folder)

    store = VersionStore(storage, make_settings(keep_versions=2))
    versions = [publish(store, version) for version in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(storage, "drop", drop_without_folder)
        versions.append(publish(store, 3))
    assert get_weights_file(folder, versions[0]).exists()
    versions.append(publish(store, 4))
    assert set(folder.iterdir()) == {get_weights_file(folder, weights) for weights in versions[2:]}


def test_missing_folder_raises_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    weights = publish(open_store(folder), 1)
    store = open_store(folder, timeout_s=0.3)
    folder.rename(tmp_path / "moved")
    folder.write_text("a file instead of the folder")
    with pytest.raises(WeightSyncError, match=r"fetching weights version 1.*/weights'.*0\.3"):
        store.fetch(weights)
    with pytest.raises(WeightSyncError, match=r"publishing weights version 2.*/weights'.*0\.3"):
        publish(store, 2)


def test_missing_permission_raises_an_error_immediately(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    store = open_store(folder, timeout_s=240.0)
    weights = publish(store, 1)
    start_s = time.monotonic()
    with remove_permissions(folder):
        with pytest.raises(WeightSyncError, match=r"Permission denied.*write weights\.path"):
            store.fetch(weights)
        with pytest.raises(WeightSyncError, match=r"Permission denied.*write weights\.path"):
            publish(store, 2)
    assert time.monotonic() - start_s < 60.0
    assert_same(store.fetch(weights).state, make_state(1))


@contextmanager
def remove_permissions(folder: Path) -> Iterator[None]:
    """Remove all permissions of the folder; root switches to another user meanwhile."""
    user_id = os.geteuid()
    folder.chmod(0)
    if user_id == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user_id)
        folder.chmod(0o700)
