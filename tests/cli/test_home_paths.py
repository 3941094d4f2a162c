"""Tests that `~` is the home directory in every path of configurations and command lines."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from ludus.env.security.tls import TlsFiles
from ludus.env.sessions.options import ServerOptions
from ludus.proto.config import (
    load_any_run_config,
    load_reward_model_config,
    load_sft_config,
    make_run_config,
)
from ludus.proto.config.mistakes import find_sections
from ludus.proto.config.run import AnyRunConfig
from ludus.proto.paths import expand_home
from ludus.services.cli.app import app
from ludus.services.gateway.config import GatewayConfig
from ludus.trainer.__main__ import main as run_trainer

PATH_FIELDS = {
    *("path", "folder", "allow_read", "output_dir", "data", "output"),
    *("ca_file", "cert_file", "key_file"),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "..")
    return tmp_path


def test_run_configuration_expands_every_path(home: Path) -> None:
    agent = {"kind": "program", "command": ["~/play", "~"], "folder": "~/a", "allow_read": ["~/b"]}
    tls = {"ca_file": "~/ca", "cert_file": "~/cert", "key_file": "~/key"}
    run: Any = make_run_config(
        {
            "output_dir": "~/myruns",
            "model": {"kind": "pretrained", "path": "~/model"},
            "weights": {"kind": "folder", "path": "~"},
            "environment": {
                "kind": "remote",
                "address": "grpcs://host:1",
                "tls": tls,
                "agent": agent,
                "rewards": [{"kind": "model", "path": "~/rm"}],
            },
        }
    )
    (environment,) = run.environments.values()
    assert run.folder.parent == home / "myruns"
    assert (run.model.path, run.weights.path) == (f"{home}/model", str(home))
    assert environment.tls.ca_file == f"{home}/ca" and environment.tls.key_file == f"{home}/key"
    assert environment.agent.command == (f"{home}/play", "~")
    assert (environment.agent.folder, environment.agent.allow_read) == (f"{home}/a", (f"{home}/b",))
    assert environment.rewards[0].path == f"{home}/rm"


def test_reward_model_run_expands_every_path(home: Path) -> None:
    run = load_reward_model_config({"model": "~/m", "data": "~/d.jsonl"}, ["output=~/o"])
    assert (run.model, run.data, run.output) == (f"{home}/m", home / "d.jsonl", home / "o")


def test_fine_tuning_run_expands_every_path(home: Path) -> None:
    settings = ["model.path=~/m", "data.path=~/d", "validation.path=~/v", "output_dir=~/o"]
    run = load_sft_config(None, settings)
    paths = (run.model.path, run.data.path, run.validation.path, run.output_dir)
    assert paths == (f"{home}/m", f"{home}/d", f"{home}/v", f"{home}/o")


def test_every_section_declares_its_paths() -> None:
    for section in set(find_sections(AnyRunConfig)):
        for name in PATH_FIELDS & set(section.model_fields):
            field = section.model_fields[name]
            if list(find_sections(field.annotation)):
                continue  # its own fields are checked
            assert "expanduser" in repr(field) or "Path" in repr(field.annotation), (section, name)


def test_server_and_gateway_options_expand_every_path(home: Path) -> None:
    options = ServerOptions(record="~/r.jsonl", allow_read=("~/data",), ready_file="~/t")
    assert options.allow_read == (home / "data",)
    assert (options.record, options.ready_file) == (home / "r.jsonl", home / "t")
    gateway = GatewayConfig.parse(
        {
            "environments": {},
            "token_file": "~/t",
            "tls": {"cert": "~/c", "key": "~/k"},
            "servers": {"token_file": "~/s"},
        }
    )
    assert (gateway.token_file, gateway.servers.token_file) == (home / "t", home / "s")
    assert gateway.tls == TlsFiles(home / "c", home / "k")


def list_path_options(group: typer.Typer) -> Iterator[tuple[str, Any]]:
    """Yield the name and the declaration of every path of the commands, except of `env serve`."""
    for command in group.registered_commands:
        callback = command.callback
        if callback is None or callback.__name__ == "serve":
            continue
        for name, parameter in inspect.signature(callback, eval_str=True).parameters.items():
            value_type, *declarations = get_args(parameter.annotation) or [None]
            if value_type in (Path, Path | None):
                yield f"{callback.__name__} {name}", declarations[0]
    for child in group.registered_groups:
        if child.typer_instance is not None:
            yield from list_path_options(child.typer_instance)


def test_every_path_of_the_command_line_is_expanded() -> None:
    options = list(list_path_options(app))
    assert len(options) > 15
    assert [name for name, option in options if option.callback is not expand_home] == []


def test_commands_find_files_in_the_home_directory(home: Path) -> None:
    (home / "run.toml").write_text('output_dir = "~/myruns"\n')
    assert load_any_run_config(Path("~/run.toml")).folder.parent == home / "myruns"
    CliRunner().invoke(app, ["init", "blackjack", "--output-dir=~/copied"])
    assert list((home / "copied").iterdir())


def test_trainer_finds_files_in_the_home_directory(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "run.toml").write_text("nmae = 1\n")
    assert run_trainer(["check", "--config=~/run.toml"]) == 2
    assert "unknown key" in capfd.readouterr().err
