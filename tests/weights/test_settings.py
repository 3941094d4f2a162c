"""What a store's settings refuse, and where they put each run's weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.config import (
    FolderWeightStore,
    LanguageModelRun,
    RayWeightStore,
    S3WeightStore,
    load_run_config,
)
from ludus.proto.errors import ConfigError
from ludus.trainer.actors.weight_store import located, make_store
from ludus.trainer.run.folder import RunFolder, ensure_run_id
from tests.weights.states import assert_same, make_state, publish

S3 = ["weights.kind=s3", "weights.bucket=models"]


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://me:open-sesame@storage.example",
        "https://open-sesame@storage.example:9000",
        "https://storage.example/?key=open-sesame",
        "https://storage.example/#open-sesame",
        "ftp://open-sesame",
    ],
)
def test_an_endpoint_holds_no_credentials_and_a_refusal_does_not_repeat_them(
    endpoint: str,
) -> None:
    with pytest.raises(ConfigError, match=r"weights\.endpoint.*AWS_SECRET_ACCESS_KEY") as raised:
        load_run_config(None, [*S3, f"weights.endpoint={endpoint}"])
    assert "open-sesame" not in str(raised.value)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9000", "https://storage.example/", None])
def test_an_endpoint_is_a_url_without_path_or_nothing(endpoint: str | None) -> None:
    assert S3WeightStore(bucket="models", endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize("bucket", ["Models", "a", "under_score", "-models", "models/other"])
def test_a_name_that_no_bucket_can_have_is_refused(bucket: str) -> None:
    with pytest.raises(ConfigError, match=r"weights\.bucket"):
        load_run_config(None, ["weights.kind=s3", f"weights.bucket={bucket}"])


def test_the_type_that_travels_is_the_learners_unless_it_is_said() -> None:
    assert RayWeightStore().published_dtype("float32") == "float32"
    assert RayWeightStore().published_dtype("bfloat16") == "bfloat16"
    assert RayWeightStore(dtype="bfloat16").published_dtype("float32") == "bfloat16"


def test_each_run_has_a_place_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run-1"
    folder = located(FolderWeightStore(), path, "7f3a")
    assert folder.path == str(path / "weights")
    shared = located(FolderWeightStore(path="/shared/weights"), path, "7f3a")
    assert shared.path == "/shared/weights/run-1-7f3a"
    bucket = located(S3WeightStore(bucket="models", prefix="team/"), path, "7f3a")
    assert bucket.prefix == "team/run-1-7f3a"
    at_top = located(S3WeightStore(bucket="models", prefix=""), path, "7f3a")
    assert at_top.prefix == "run-1-7f3a"


def test_runs_of_one_name_in_two_folders_leave_each_others_weights_alone(tmp_path: Path) -> None:
    """A store removes what earlier processes of its run have left."""
    config = FolderWeightStore(path=str(tmp_path / "shared"))
    stores, published = [], []
    for output_dir in ("mine", "theirs"):
        run = LanguageModelRun.model_validate(
            {"name": "demo", "output_dir": str(tmp_path / output_dir)}
        )
        folder = RunFolder.create(run, overwrite=False)
        stores.append(make_store(located(config, folder.path, ensure_run_id(folder.path))))
        published.append(publish(stores[-1], 1))
        folder.close()
    for store, version in zip(stores, published, strict=True):
        assert_same(store.fetch(version).state, make_state(1))
