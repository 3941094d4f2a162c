"""Weights in a bucket of a real S3-compatible server, which may be killed during a transfer."""

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
from ludus.trainer.weights.bucket import BucketStorage
from ludus.trainer.weights.store import VersionStore
from tests.weights.states import assert_same, make_state, publish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return the server, with its credentials in the environment."""
    with running_s3_server(tmp_path_factory.mktemp("s3")) as s3_server:
        os.environ.update(s3_server.credentials)
        yield s3_server
        for name in s3_server.credentials:
            del os.environ[name]


@pytest.fixture
def config(server: S3Server, request: pytest.FixtureRequest) -> S3WeightStore:
    """Return the settings of a store with a prefix for this test."""
    return S3WeightStore(
        bucket=server.bucket,
        endpoint=server.endpoint,
        prefix=f"ludus/{request.node.name}".replace("[", "-").replace("]", ""),
        timeout_s=240.0,
        full_every=4,
    )


def open_store(config: S3WeightStore, **config_changes: object) -> VersionStore:
    """Return a store in the bucket."""
    config = config.model_copy(update=config_changes)
    return VersionStore(BucketStorage(config), config)


def list_keys(server: S3Server, config: S3WeightStore) -> list[str]:
    """Return the keys below the prefix, oldest first."""
    paths = [entry["path"] for page in obstore.list(server.store, config.prefix) for entry in page]
    return sorted(key.removeprefix(f"{config.prefix}/") for key in paths)


@contextmanager
def kill_briefly(server: S3Server) -> Iterator[None]:
    """Kill the server when the block starts, and start it again 2 s later."""

    def kill_and_restart() -> None:
        time.sleep(0.05)
        server.kill()
        time.sleep(2.0)
        server.start()

    thread = threading.Thread(target=kill_and_restart)
    thread.start()
    yield
    thread.join()
    server.wait_until_ready()


@contextmanager
def freeze_briefly(server: S3Server) -> Iterator[None]:
    """Let the server accept connections without responding, for 2 s."""
    server.freeze()
    timer = threading.Timer(2.0, server.thaw)
    timer.start()
    yield
    timer.join()


def make_big_state(version: int, num_bytes: int = 40_000_000) -> dict[str, torch.Tensor]:
    """Return tensors large enough for a multipart upload."""
    generator = torch.Generator().manual_seed(version)
    return {"w": torch.randn(num_bytes // 4, generator=generator), "b": torch.ones(3)}


def test_versions_are_fetched_exactly_and_old_versions_are_deleted(
    server: S3Server, config: S3WeightStore
) -> None:
    learner, worker = open_store(config), open_store(config)
    for version in range(6):
        weights = publish(learner, version)
        assert_same(worker.fetch(weights).state, make_state(version))
    assert_same(open_store(config).fetch(weights).state, make_state(5))
    assert [int(key[1:9]) for key in list_keys(server, config)] == [4, 5]


def test_multipart_upload_preserves_the_weights_exactly(config: S3WeightStore) -> None:
    learner, worker = open_store(config), open_store(config)
    fetched_weights = worker.fetch(publish(learner, 0, make_big_state(0)))
    assert_same(fetched_weights.state, make_big_state(0))
    assert fetched_weights.num_bytes > 40_000_000


def test_unrelated_objects_are_not_deleted(server: S3Server, config: S3WeightStore) -> None:
    for object_name in ("notes.txt", "v00000001-abc.txt"):
        obstore.put(server.store, f"{config.prefix}/{object_name}", b"text")
    publish(open_store(config), 1)
    publish(open_store(config), 2)
    remaining_keys = list_keys(server, config)
    assert {"notes.txt", "v00000001-abc.txt"} < set(remaining_keys)
    assert len(remaining_keys) == 3


def test_fetching_a_damaged_truncated_or_missing_object_fails(
    server: S3Server, config: S3WeightStore
) -> None:
    weights = publish(open_store(config), 1)
    key = f"{config.prefix}/{weights.payloads[0].location}"
    content = bytearray(obstore.get(server.store, key).bytes())
    content[-1] ^= 1
    obstore.put(server.store, key, bytes(content))
    with pytest.raises(WeightSyncError, match="arrived altered"):
        open_store(config).fetch(weights)
    obstore.put(server.store, key, bytes(content[:-1]))
    with pytest.raises(WeightSyncError, match=r"has \d+ bytes instead of \d+"):
        open_store(config).fetch(weights)
    obstore.delete(server.store, key)
    with pytest.raises(WeightSyncError, match=r"bucket 'weights'.*not found.*keep_versions"):
        open_store(config).fetch(weights)


def test_wrong_credentials_are_refused_without_revealing_them(
    config: S3WeightStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "not-the-secret-0123456789"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    caplog.set_level(logging.DEBUG)
    start_s = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"SignatureDoesNotMatch.*AWS_ACCESS_KEY_ID") as error:
        publish(open_store(config), 1)
    assert time.monotonic() - start_s < 120
    output = f"{error.value!r} {error.value.__cause__!r} {caplog.text} {vars(open_store(config))}"
    assert secret not in output + repr(vars(BucketStorage(config)))
    assert os.environ["AWS_ACCESS_KEY_ID"] not in output


def test_check_accepts_only_a_reachable_bucket(
    config: S3WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    BucketStorage(config).check()
    with pytest.raises(ConfigError, match=r"weights\.bucket = 'elsewhere'"):
        BucketStorage(config.model_copy(update={"bucket": "elsewhere"})).check()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        BucketStorage(config).check()


@pytest.mark.long
def test_publish_and_fetch_succeed_despite_a_server_restart(
    server: S3Server, config: S3WeightStore
) -> None:
    learner, worker = open_store(config), open_store(config)
    publish(learner, 0, make_big_state(0))
    with kill_briefly(server):
        weights = publish(learner, 4, make_big_state(4))
    with kill_briefly(server):
        assert_same(worker.fetch(weights).state, make_big_state(4))


def test_publish_and_fetch_succeed_despite_a_server_freeze(
    server: S3Server, config: S3WeightStore
) -> None:
    learner, worker = open_store(config), open_store(config)
    with freeze_briefly(server):
        weights = publish(learner, 0)
    with freeze_briefly(server):
        assert_same(worker.fetch(weights).state, make_state(0))


def test_hanging_server_raises_an_error(config: S3WeightStore) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        start_s = time.monotonic()
        with pytest.raises(
            WeightSyncError, match=rf"publishing weights version 3 to .*{endpoint}.*timeout_s = 2"
        ):
            publish(open_store(config, endpoint=endpoint, timeout_s=2.0), 3)
        assert time.monotonic() - start_s < 120.0
