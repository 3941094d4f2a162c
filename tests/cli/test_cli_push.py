"""`ludus export --push-to-hub` against a local server that plays the Hub."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import RunCli
from tests.cli.hub_server import Hub, Repository, run_hub
from tests.controller.trained_run import make_original_model, make_trained_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_original_model(tmp_path_factory.mktemp("original"))


@pytest.fixture
def run_folder(original: Path, ludus: RunCli, tmp_path: Path) -> Path:
    return make_trained_run(original, tmp_path / "runs" / "demo")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a Hub, and use it with a token that may write."""
    with run_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging-face"))
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


def list_temporary_folders(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "runs").iterdir() if path.name != "demo"]


def test_a_model_is_uploaded_from_a_folder_that_stays(
    ludus: RunCli, run_folder: Path, hub: Hub, tmp_path: Path
) -> None:
    result = ludus("export", "demo", "demo-model", "--push-to-hub", "demo-model", "--private")
    assert result.code == 0, result.err
    assert result.out.splitlines()[:3] == [
        "demo-model",
        f"{hub.address}/me/demo-model",
        "serve it    vllm serve me/demo-model",
    ]
    repository = hub.repositories["me/demo-model"]
    assert repository.is_private
    files = {path.name: path.read_bytes() for path in (tmp_path / "demo-model").iterdir()}
    assert repository.files == files
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files.keys()


def test_an_upload_without_folder_replaces_weights_and_leaves_no_files(
    ludus: RunCli, run_folder: Path, hub: Hub, tmp_path: Path
) -> None:
    old_files = {"model-00001-of-00002.safetensors": b"old", "notes.md": b"mine"}
    hub.repositories["me/demo"] = Repository(files=dict(old_files))
    result = ludus("export", "demo@2", "--push-to-hub", "me/demo")
    assert result.code == 0, result.err
    assert result.out.splitlines()[0] == f"{hub.address}/me/demo"
    files = hub.repositories["me/demo"].files
    assert b"weights of step 2" in files["README.md"]
    assert files["notes.md"] == b"mine"
    assert [name for name in files if name.endswith(".safetensors")] == ["model.safetensors"]
    assert list_temporary_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"HF_TOKEN": ""}, ["me/demo"], "needs a token; set HF_TOKEN to a token with write access"),
        ({"HF_TOKEN": "hf_wrong"}, ["me/demo"], "refuses the token; set HF_TOKEN"),
        ({"HF_TOKEN": "hf_read"}, ["me/demo"], "the Hugging Face token may only read"),
        ({"HF_HUB_OFFLINE": "1"}, ["me/demo"], "HF_HUB_OFFLINE forbids uploads"),
        ({}, ["a/b/c"], "'a/b/c' cannot be the name of a repository: "),
        ({}, ["me/de mo"], "'me/de mo' cannot be the name of a repository: "),
        ({}, ["you/demo"], "the token may not write to 'you/demo': You have no rights"),
        ({}, ["me/public", "--private"], "'me/public' exists and is public; make it private"),
    ],
    ids=["none", "wrong", "read", "offline", "slashes", "space", "owner", "public"],
)
def test_an_impossible_upload_is_refused_before_the_export(
    ludus: RunCli,
    run_folder: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    options: list[str],
    message: str,
) -> None:
    hub.repositories["me/public"] = Repository()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # An export would fail, because the weights are missing.
    (run_folder / "checkpoints/step-00000004/model/model.safetensors").unlink()
    result = ludus("export", "demo@4", "demo-model", "--push-to-hub", *options)
    assert result.code == 2
    assert message in " ".join(result.err.split())
    assert result.err.count("error: ") == 1
    assert not (tmp_path / "demo-model").exists()


def test_a_hub_that_does_not_respond_is_reported(
    ludus: RunCli, run_folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    result = ludus("export", "demo", "--push-to-hub", "me/demo")
    assert result.code == 2
    message = " ".join(result.err.split())
    assert f"the Hugging Face Hub ({address}) does not respond: " in message
    assert "check the network, or set HF_ENDPOINT to a mirror" in message


def test_a_folder_with_files_is_refused_before_the_hub_gets_a_request(
    ludus: RunCli, run_folder: Path, hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    result = ludus("export", "demo", "taken", "--push-to-hub", "me/demo")
    assert result.code == 2
    assert "'taken' has files" in result.err
    assert hub.paths == []


@pytest.mark.parametrize("folder", ["demo-model", None])
def test_a_failed_upload_keeps_a_named_folder_only(
    ludus: RunCli, run_folder: Path, hub: Hub, tmp_path: Path, folder: str | None
) -> None:
    hub.refuses_commits = True
    result = ludus("export", "demo", *([folder] if folder else []), "--push-to-hub", "me/demo")
    assert result.code == 2
    assert "the token may not write to 'me/demo': the storage is full" in result.err
    assert (tmp_path / "demo-model" / "model.safetensors").exists() == bool(folder)
    assert ("upload it: hf upload me/demo demo-model" in result.err) == bool(folder)
    assert list_temporary_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a FOLDER, or add --push-to-hub ID"),
        (("demo-model", "--private"), "--private is for an upload; add --push-to-hub ID"),
    ],
)
def test_a_model_needs_a_place(
    ludus: RunCli, run_folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = ludus("export", "demo", *arguments)
    assert result.code == 2
    assert message in result.err
