"""Weights in a bucket of a real S3-compatible server, which may be killed in the middle."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import obstore
import pytest
import torch
from upstream_s3_server import S3Server, running_s3_server

from ludus.proto.config import S3WeightStore
from ludus.proto.errors import ConfigError, WeightSyncError
from ludus.trainer.weights import VersionStore
from ludus.trainer.weights.bucket import BucketObjects
from tests.weights.states import assert_same, make_state, publish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server, with its credentials in the environment as a run has them."""
    with running_s3_server(tmp_path_factory.mktemp("s3")) as running:
        os.environ.update(running.credentials)
        yield running
        for name in running.credentials:
            del os.environ[name]


@pytest.fixture
def config(server: S3Server, request: pytest.FixtureRequest) -> S3WeightStore:
    """A store's settings, with a prefix of the test's own."""
    return S3WeightStore(
        bucket=server.bucket,
        endpoint=server.endpoint,
        prefix=f"ludus/{request.node.name}".replace("[", "-").replace("]", ""),
        timeout_s=240.0,
        full_every=4,
    )


def store_of(config: S3WeightStore, **changes: object) -> VersionStore:
    """A store of the bucket."""
    config = config.model_copy(update=changes)
    return VersionStore(BucketObjects(config), config)


def keys(server: S3Server, config: S3WeightStore) -> list[str]:
    """The keys below the prefix, oldest first."""
    found = [item["path"] for page in obstore.list(server.store, config.prefix) for item in page]
    return sorted(key.removeprefix(f"{config.prefix}/") for key in found)


@contextmanager
def killed_for_a_while(server: S3Server) -> Iterator[None]:
    """Kills the server just after the block begins, and starts it again 2 s later."""

    def outage() -> None:
        time.sleep(0.05)
        server.kill()
        time.sleep(2.0)
        server.start()

    thread = threading.Thread(target=outage)
    thread.start()
    yield
    thread.join()
    server.wait_until_ready()


@contextmanager
def frozen_for_a_while(server: S3Server) -> Iterator[None]:
    """The server accepts connections and answers nobody, for 2 s."""
    server.freeze()
    thaw = threading.Timer(2.0, server.thaw)
    thaw.start()
    yield
    thaw.join()


def big_state(version: int, num_bytes: int = 40_000_000) -> dict[str, torch.Tensor]:
    """Tensors of several parts of an upload."""
    noise = torch.Generator().manual_seed(version)
    return {"w": torch.randn(num_bytes // 4, generator=noise), "b": torch.ones(3)}


def test_versions_come_back_bit_for_bit_and_old_ones_go(
    server: S3Server, config: S3WeightStore
) -> None:
    learner, worker = store_of(config), store_of(config)
    for version in range(6):
        newest = publish(learner, version)
        assert_same(worker.fetch(newest).state, make_state(version))
    assert_same(store_of(config).fetch(newest).state, make_state(5))
    assert [int(key[1:9]) for key in keys(server, config)] == [4, 5]


def test_an_upload_of_many_parts_comes_back_bit_for_bit(config: S3WeightStore) -> None:
    learner, worker = store_of(config), store_of(config)
    fetched = worker.fetch(publish(learner, 0, big_state(0)))
    assert_same(fetched.state, big_state(0))
    assert fetched.num_bytes > 40_000_000


def test_objects_of_others_are_left_alone(server: S3Server, config: S3WeightStore) -> None:
    for name in ("notes.txt", "v00000001-abc.txt"):
        obstore.put(server.store, f"{config.prefix}/{name}", b"mine")
    publish(store_of(config), 1)
    publish(store_of(config), 2)
    names = keys(server, config)
    assert {"notes.txt", "v00000001-abc.txt"} < set(names)
    assert len(names) == 3


def test_an_object_that_is_altered_cut_off_or_gone_is_refused(
    server: S3Server, config: S3WeightStore
) -> None:
    published = publish(store_of(config), 1)
    key = f"{config.prefix}/{published.location[0].location}"
    content = bytearray(obstore.get(server.store, key).bytes())
    content[-1] ^= 1
    obstore.put(server.store, key, bytes(content))
    with pytest.raises(WeightSyncError, match="arrived altered"):
        store_of(config).fetch(published)
    obstore.put(server.store, key, bytes(content[:-1]))
    with pytest.raises(WeightSyncError, match=r"was cut off: expected \d+ bytes"):
        store_of(config).fetch(published)
    obstore.delete(server.store, key)
    with pytest.raises(WeightSyncError, match=r"bucket 'weights'.*not found.*keep_versions"):
        store_of(config).fetch(published)


def test_wrong_credentials_are_told_at_once_and_never_repeated(
    config: S3WeightStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "not-the-secret-0123456789"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    caplog.set_level(logging.DEBUG)
    begun = time.monotonic()
    with pytest.raises(
        WeightSyncError, match=r"SignatureDoesNotMatch.*AWS_ACCESS_KEY_ID"
    ) as raised:
        publish(store_of(config), 1)
    assert time.monotonic() - begun < 120
    shown = f"{raised.value!r} {raised.value.__cause__!r} {caplog.text} {vars(store_of(config))}"
    assert secret not in shown + repr(BucketObjects(config)._store)
    assert os.environ["AWS_ACCESS_KEY_ID"] not in shown


def test_a_bucket_that_answers_passes_the_check_and_another_is_a_user_error(
    config: S3WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    BucketObjects(config).check()
    with pytest.raises(ConfigError, match=r"weights\.bucket = 'elsewhere'"):
        BucketObjects(config.model_copy(update={"bucket": "elsewhere"})).check()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        BucketObjects(config).check()


def test_a_server_that_is_killed_while_it_is_written_to_and_read_only_delays(
    server: S3Server, config: S3WeightStore
) -> None:
    learner, worker = store_of(config), store_of(config)
    publish(learner, 0, big_state(0))
    with killed_for_a_while(server):
        newest = publish(learner, 4, big_state(4))
    with killed_for_a_while(server):
        assert_same(worker.fetch(newest).state, big_state(4))


def test_a_server_that_hangs_for_a_while_only_delays(
    server: S3Server, config: S3WeightStore
) -> None:
    learner, worker = store_of(config), store_of(config)
    with frozen_for_a_while(server):
        newest = publish(learner, 0)
    with frozen_for_a_while(server):
        assert_same(worker.fetch(newest).state, make_state(0))


def test_a_server_that_accepts_and_never_answers_ends_in_an_error(config: S3WeightStore) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()
        endpoint = f"http://127.0.0.1:{hole.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(
            WeightSyncError, match=rf"publishing weights version 3 to .*{endpoint}.*timeout_s = 2"
        ):
            publish(store_of(config, endpoint=endpoint, timeout_s=2.0), 3)
        assert time.monotonic() - begun < 120.0
