"""Weights in a folder: complete, unaltered, and no older than wanted."""

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
from ludus.trainer.weights import VersionStore
from ludus.trainer.weights.folder import FolderFiles
from tests.weights.states import assert_same, make_state, publish, settings


def folder_store(folder: Path, **fields: float) -> VersionStore:
    """A store of the folder."""
    return VersionStore(FolderFiles(folder), settings(**fields))


def weights_file(folder: Path, published: PublishedWeights) -> Path:
    """The file of the newest link."""
    return folder / str(published.location[-1].location)


def test_a_version_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    assert_same(store.fetch(publish(store, 3)).state, make_state(3))


def test_a_complete_version_is_a_file_that_others_can_read(tmp_path: Path) -> None:
    published = publish(folder_store(tmp_path), 3)
    assert_same(load_file(weights_file(tmp_path, published)), make_state(3))


def test_another_process_of_the_same_folder_can_fetch(tmp_path: Path) -> None:
    learner = folder_store(tmp_path, full_every=3)
    published = [publish(learner, version) for version in (1, 2)]
    assert_same(folder_store(tmp_path).fetch(published[1]).state, make_state(2))


def test_versions_of_a_later_step_give_way_when_a_run_continues_from_before(tmp_path: Path) -> None:
    for version in (7, 8, 9):
        publish(folder_store(tmp_path), version)
    store = folder_store(tmp_path)
    published = publish(store, 5)
    assert_same(store.fetch(published).state, make_state(5))
    assert list(tmp_path.iterdir()) == [weights_file(tmp_path, published)]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "videos.txt").write_text("mine")
    (tmp_path / "v1").mkdir()
    publish(folder_store(tmp_path), 5)
    assert (tmp_path / "videos.txt").exists()
    assert (tmp_path / "v1").exists()


def test_only_the_newest_versions_stay(tmp_path: Path) -> None:
    store = folder_store(tmp_path, keep_versions=2)
    published = [publish(store, version) for version in range(9, 13)]
    for version, kept in zip((11, 12), published[2:], strict=True):
        assert_same(store.fetch(kept).state, make_state(version))
    for dropped in published[:2]:
        with pytest.raises(WeightSyncError, match=r"has no .v0000.*keep_versions"):
            store.fetch(dropped)


def test_a_version_published_again_replaces_the_first(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    publish(store, 5)
    again = publish(store, 5, make_state(50))
    assert_same(store.fetch(again).state, make_state(50))


def test_what_a_crash_left_half_written_goes_and_is_never_counted(tmp_path: Path) -> None:
    left = tmp_path / "v00000007-0123456789ab.safetensors.partial"
    left.write_bytes(b"half")
    store = folder_store(tmp_path, keep_versions=2)
    published = [publish(store, version) for version in (5, 6, 7)]
    assert not left.exists()
    for version, kept in zip((6, 7), published[1:], strict=True):
        assert_same(store.fetch(kept).state, make_state(version))


@pytest.mark.parametrize("position", [-1, -40])
def test_one_altered_byte_is_found(tmp_path: Path, position: int) -> None:
    store = folder_store(tmp_path)
    published = publish(store, 1)
    content = bytearray(weights_file(tmp_path, published).read_bytes())
    content[position] ^= 1
    weights_file(tmp_path, published).write_bytes(content)
    with pytest.raises(WeightSyncError, match="arrived altered"):
        store.fetch(published)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, share: float) -> None:
    store = folder_store(tmp_path)
    published = publish(store, 1)
    content = weights_file(tmp_path, published).read_bytes()
    weights_file(tmp_path, published).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(WeightSyncError, match=r"cut off: expected \d+ bytes.*weights\.path"):
        store.fetch(published)


def test_a_folder_that_is_away_for_a_moment_only_delays(tmp_path: Path) -> None:
    folder, aside = tmp_path / "weights", tmp_path / "aside"
    store = folder_store(folder, timeout_s=120.0)
    publish(store, 1)
    for call in (lambda: publish(store, 2), lambda: store.fetch(publish(store, 3))):
        folder.rename(aside)
        back = threading.Timer(0.3, lambda: aside.rename(folder))
        back.start()
        call()
        back.join()


def test_what_cannot_be_dropped_while_the_folder_is_away_is_dropped_after_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, aside = tmp_path / "weights", tmp_path / "aside"
    files = FolderFiles(folder)
    drop = files.drop

    def drop_while_away(location: str) -> None:
        folder.rename(aside)
        try:
            drop(location)
        finally:
            aside.rename(folder)

    store = VersionStore(files, settings(keep_versions=2))
    published = [publish(store, version) for version in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(files, "drop", drop_while_away)
        published.append(publish(store, 3))
    assert weights_file(folder, published[0]).exists()
    published.append(publish(store, 4))
    assert set(folder.iterdir()) == {weights_file(folder, kept) for kept in published[2:]}


def test_a_folder_that_stays_away_ends_in_an_error_that_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    published = publish(folder_store(folder), 1)
    store = folder_store(folder, timeout_s=0.3)
    folder.rename(tmp_path / "aside")
    folder.write_text("a file where the folder was")
    with pytest.raises(WeightSyncError, match=r"fetching weights version 1.*/weights'.*0\.3"):
        store.fetch(published)
    with pytest.raises(WeightSyncError, match=r"publishing weights version 2.*/weights'.*0\.3"):
        publish(store, 2)


def test_a_folder_that_may_not_be_read_or_written_is_told_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    store = folder_store(folder, timeout_s=240.0)
    published = publish(store, 1)
    begun = time.monotonic()
    with without_permission(folder):
        with pytest.raises(WeightSyncError, match=r"Permission denied.*write weights\.path"):
            store.fetch(published)
        with pytest.raises(WeightSyncError, match=r"Permission denied.*write weights\.path"):
            publish(store, 2)
    assert time.monotonic() - begun < 60.0
    assert_same(store.fetch(published).state, make_state(1))


@contextmanager
def without_permission(folder: Path) -> Iterator[None]:
    """Nobody may enter the folder; root, who may enter any, is somebody else for the moment."""
    user = os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
