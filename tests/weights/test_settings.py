"""Validation of a store's settings, and the location of each run's weights."""

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
from ludus.trainer.actors.weight_store import make_store, resolve_location
from ludus.trainer.run.lifecycle import RunFolder, ensure_run_id
from tests.weights.states import assert_same, make_state, publish

S3_OVERRIDES = ["weights.kind=s3", "weights.bucket=models"]


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
def test_endpoint_with_credentials_is_refused_without_revealing_them(
    endpoint: str,
) -> None:
    with pytest.raises(
        ConfigError, match=r"weights\.endpoint.*AWS_SECRET_ACCESS_KEY"
    ) as error_info:
        load_run_config(None, [*S3_OVERRIDES, f"weights.endpoint={endpoint}"])
    assert "open-sesame" not in str(error_info.value)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9000", "https://storage.example/", None])
def test_endpoint_url_without_a_path_is_accepted(endpoint: str | None) -> None:
    assert S3WeightStore(bucket="models", endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize("bucket", ["Models", "a", "under_score", "-models", "models/other"])
def test_invalid_bucket_name_is_refused(bucket: str) -> None:
    with pytest.raises(ConfigError, match=r"weights\.bucket"):
        load_run_config(None, ["weights.kind=s3", f"weights.bucket={bucket}"])


def test_published_dtype_defaults_to_the_learner_dtype() -> None:
    assert RayWeightStore().choose_dtype("float32") == "float32"
    assert RayWeightStore().choose_dtype("bfloat16") == "bfloat16"
    assert RayWeightStore(dtype="bfloat16").choose_dtype("float32") == "bfloat16"


def test_each_run_has_a_separate_location(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run-1"
    folder_settings = resolve_location(FolderWeightStore(), path, "7f3a")
    assert folder_settings.path == str(path / "weights")
    shared_settings = resolve_location(FolderWeightStore(path="/shared/weights"), path, "7f3a")
    assert shared_settings.path == "/shared/weights/run-1-7f3a"
    bucket_settings = resolve_location(S3WeightStore(bucket="models", prefix="team/"), path, "7f3a")
    assert bucket_settings.prefix == "team/run-1-7f3a"
    settings_without_prefix = resolve_location(
        S3WeightStore(bucket="models", prefix=""), path, "7f3a"
    )
    assert settings_without_prefix.prefix == "run-1-7f3a"


def test_runs_with_equal_names_do_not_delete_weights_of_other_runs(tmp_path: Path) -> None:
    """A store deletes the versions of earlier processes of its run."""
    config = FolderWeightStore(path=str(tmp_path / "shared"))
    stores, versions = [], []
    for output_dir in ("first", "second"):
        run = LanguageModelRun.model_validate(
            {"name": "demo", "output_dir": str(tmp_path / output_dir)}
        )
        folder = RunFolder.create(run, overwrite=False)
        stores.append(make_store(resolve_location(config, folder.path, ensure_run_id(folder.path))))
        versions.append(publish(stores[-1], 1))
        folder.close()
    for store, weights in zip(stores, versions, strict=True):
        assert_same(store.fetch(weights).state, make_state(1))
