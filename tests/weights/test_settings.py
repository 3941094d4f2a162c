"""What a store's settings refuse, and where they put each run's weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.config import FolderWeightStore, RayWeightStore, S3WeightStore, load_run_config
from ludus.proto.errors import ConfigError
from ludus.trainer.actors.weight_store import located

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
    assert RayWeightStore().travelling_dtype("float32") == "float32"
    assert RayWeightStore().travelling_dtype("bfloat16") == "bfloat16"
    assert RayWeightStore(dtype="bfloat16").travelling_dtype("float32") == "bfloat16"


def test_each_run_has_a_place_of_its_own(tmp_path: Path) -> None:
    folder = located(FolderWeightStore(), "run-1", tmp_path / "runs" / "run-1")
    assert folder.path == str(tmp_path / "runs" / "run-1" / "weights")
    shared = located(FolderWeightStore(path="/shared/weights"), "run-1", tmp_path)
    assert shared.path == "/shared/weights/run-1"
    bucket = located(S3WeightStore(bucket="models", prefix="team/"), "run-1", tmp_path)
    assert bucket.prefix == "team/run-1"
    assert located(S3WeightStore(bucket="models", prefix=""), "run-1", tmp_path).prefix == "run-1"
