"""Models are loaded from the cache or refused if Hugging Face does not respond."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import NotFoundError
from ludus.proto.runs import Resume
from ludus.trainer.driver.checks import check_model_path, check_start
from ludus.trainer.models import load
from ludus.trainer.models.tiny import make_tokenizer

MODEL = "nobody/model"


class SilentHub:
    """A hub server that accepts connections, counts HEAD requests and never responds."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._num_requests = 0
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept_connections, daemon=True).start()

    @property
    def num_requests(self) -> int:
        return self._num_requests

    def _accept_connections(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                # The hub's client also fetches an unrelated list, once per process.
                self._num_requests += connection.recv(5) == b"HEAD "
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in (self._listener, *self._connections):
            connection.close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentHub]:
    """Use a silent hub and an empty cache; yield the hub."""
    silent_hub = SilentHub()
    monkeypatch.setattr(load.hub, "ENDPOINT", silent_hub.address)
    monkeypatch.setattr(load.hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(load, "get_current_minute", lambda: 0)
    load.is_hub_reachable.cache_clear()
    yield silent_hub
    silent_hub.close()
    load.is_hub_reachable.cache_clear()


class RefusingHandler(BaseHTTPRequestHandler):
    """A hub server that refuses every model with the error code in the model's id."""

    def do_HEAD(self) -> None:
        self._refuse()

    def do_GET(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        self.send_response(200 if self.path == "/" else 401)
        self.send_header("X-Error-Code", self.path.split("/")[2] if self.path != "/" else "")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("GatedRepo", "the model is gated; accept its license at http.*/GatedRepo, and set"),
        ("RepoNotFound", "has no such model, and there is no such folder; correct the id, or if"),
    ],
)
def test_refusal_of_the_hub_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(load.hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusingHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(load.hub, "ENDPOINT", address)
        monkeypatch.setattr(
            load.hub,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        load.is_hub_reachable.cache_clear()
        for load_model in (check_model_path, load.load_tokenizer, load.load_language_model):
            with pytest.raises(NotFoundError, match=rf"'org/{code}': .*{message}"):
                load_model(f"org/{code}")
        server.shutdown()
    load.is_hub_reachable.cache_clear()


def put_in_cache(cache: Path, folder: Path) -> None:
    """Copy a model folder into the cache as `MODEL`."""
    cached_model = cache / f"models--{MODEL.replace('/', '--')}"
    shutil.copytree(folder, cached_model / "snapshots" / "abc")
    (cached_model / "refs").mkdir()
    (cached_model / "refs" / "main").write_text("abc")


@pytest.mark.slow
def test_unresponsive_hub_is_tried_once_and_reported(hub: SilentHub) -> None:
    message = (
        rf"model\.path = '{MODEL}': there is no such folder in the working folder .*, Hugging Face "
        rf"\({hub.address}\) does not respond.*HF_ENDPOINT"
    )
    for load_model in (
        check_model_path,
        load.load_tokenizer,
        load.load_skeleton,
        load.load_language_model,
    ):
        with pytest.raises(NotFoundError, match=message):
            load_model(MODEL)
    assert hub.num_requests == 1


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_dry_run_reports_an_unresponsive_hub(tmp_path: Path) -> None:
    model = {"kind": "pretrained", "path": MODEL}
    run = LanguageModelRun.model_validate({"model": model, "output_dir": str(tmp_path / "runs")})
    with pytest.raises(NotFoundError, match="does not respond"):
        check_start(run, Resume.NEVER)


@pytest.mark.slow
def test_hub_that_recovers_is_used_again(monkeypatch: pytest.MonkeyPatch, hub: SilentHub) -> None:
    for minute in (0, 0, 1):
        monkeypatch.setattr(load, "get_current_minute", lambda minute=minute: minute)
        with pytest.raises(NotFoundError):
            check_model_path(MODEL)
    assert hub.num_requests == 2


@pytest.mark.slow
def test_cached_model_needs_no_hub(hub: SilentHub, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["HIT or STAND"], 300)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    put_in_cache(tmp_path / "cache", tmp_path / "model")
    check_model_path(MODEL)
    assert load.load_tokenizer(MODEL).encode("HIT") == tokenizer.encode("HIT")
    assert load.load_language_model(MODEL).config.hidden_size == 32
    assert hub.num_requests == 1
