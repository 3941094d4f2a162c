"""`ludus init`, which copies an example run configuration."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ludus.proto.config import load_run_config
from tests.cli.commands import RunCli


def test_init_without_a_name_lists_every_example(ludus: RunCli) -> None:
    result = ludus("init")
    assert result.code == 0
    assert "blackjack" in result.out
    assert "cartpole" in result.out


@pytest.mark.parametrize("name", ["blackjack", "cartpole", "cot", "agents"])
def test_copied_example_is_a_valid_configuration(ludus: RunCli, name: str) -> None:
    result = ludus("init", name)
    assert result.code == 0
    assert f"ludus train {name}.toml" in result.out
    assert load_run_config(Path(f"{name}.toml"), []).name == name
    assert "examples/" not in Path(f"{name}.toml").read_text(encoding="utf-8")


def test_data_is_copied_next_to_the_configuration(ludus: RunCli) -> None:
    ludus("init", "cot", "--output-dir", "copy")
    config = tomllib.loads(Path("copy/cot.toml").read_text(encoding="utf-8"))
    assert (Path("copy") / config["environment"]["options"]["path"]).is_file()


def test_init_does_not_overwrite_an_existing_file(ludus: RunCli) -> None:
    Path("blackjack.toml").write_text("original text", encoding="utf-8")
    result = ludus("init", "blackjack")
    assert result.code == 2
    assert "'blackjack.toml' exists; remove it" in result.err
    assert Path("blackjack.toml").read_text(encoding="utf-8") == "original text"


def test_unknown_example_error_lists_known_examples(ludus: RunCli) -> None:
    result = ludus("init", "blackjak")
    assert result.code == 2
    assert "no example is named 'blackjak'" in result.err
    assert "blackjack" in result.err


def test_version_option_prints_the_version(ludus: RunCli) -> None:
    result = ludus("--version")
    assert result.code == 0
    assert result.out.startswith("ludus ")
