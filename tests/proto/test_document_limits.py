"""Configuration files and overrides with a huge or deep meaning end in one short sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from ludus.env.options import EnvironmentOptions, JsonOption
from ludus.env.serving.application import parse_json_options
from ludus.proto.config import load_run_config, make_run_config
from ludus.proto.documents import MAX_DEPTH, read_document
from ludus.proto.errors import ConfigError
from ludus.services.cli.options import parse_options
from ludus.services.gateway.config import GatewayConfig
from ludus.services.gateway.tenancy.tenants import TenantsFile
from ludus.services.runs.platform import read_release_file
from ludus.trainer.compat.forge.configuration import load_forge_config

ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{level}: &a{level}\n  <<: [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
DEEP, MANY, LONG, CYCLE = "nested deeper than", "values", "bytes", "contains itself"
NUMBER = "a number in it is too long|a number, date or tagged value in it is not valid"
HALF = "contains half of a character"
TEXTS = [
    ("a.toml", "a = " + "[" * 5000 + "]" * 5000, DEEP),
    ("b.toml", "a = " + "{b = " * 5000 + "1" + "}" * 5000, DEEP),
    ("c.toml", "a = " + "[" * 100 + "]" * 100, DEEP),
    ("d.toml", "[a" + ".a" * 100_000 + "]", DEEP),
    ("e.toml", "a" + '."b"' * 100_000 + "= 1", DEEP),
    ("j.toml", "a" + '."\\""' * 60_000 + "= 1", DEEP),
    ("k.toml", "a" + ".'\"'" * 60_000 + "= 1", DEEP),
    ("l.toml", "a = {" + "a . " * 60_000 + "a = 1}", DEEP),
    ("f.toml", "".join(f"[{'.'.join('a' * depth)}]\n" for depth in range(1, 100)), DEEP),
    ("g.toml", "name = 0x" + "f" * 100_000, NUMBER),
    ("h.toml", "name = " + "1" * 100_000, NUMBER),
    ("i.toml", "#" * 2_000_000, LONG),
    ("a.json", "[" * 100_000, DEEP),
    ("b.json", '{"a":' * 100_000, DEEP),
    ("c.json", '{"a":' * 100 + "1" + "}" * 100, DEEP),
    ("d.json", '{"name": ' + "1" * 5000 + "}", NUMBER),
    ("g.json", '{"seed": 340282366920938463463374607431768211456}', NUMBER),
    ("h.json", '{"name": "\\ud800"}', HALF),
    ("i.json", '{"environment": {"options": {"\\udfff": ["a"]}}}', HALF),
    ("e.json", '{"a": [' + "1," * 300_000 + "1]}", MANY),
    ("j.json", "{" + ",".join(f'"{index}": 1' for index in range(100_001)) + "}", MANY),
    ("f.json", " " * 20_000_000, LONG),
    ("a.yaml", ALIAS_BOMB, MANY),
    ("b.yaml", MERGE_BOMB, MANY),
    ("c.yaml", "a: &a [*a]", CYCLE),
    ("d.yaml", "a: &a {b: {c: [*a]}}", CYCLE),
    ("e.yaml", "&a {a: *a}", CYCLE),
    ("f.yaml", "a: " + "[" * 100_000, DEEP),
    ("g.yaml", "? " * 100_000, DEEP),
    ("h.yaml", "a: " + "{b: " * 100 + "}" * 100, DEEP),
    ("i.yaml", "a: 1" + ":1" * 200_000, NUMBER),
    ("j.yaml", "a: 0x" + "f" * 100_000, NUMBER),
    ("q.yaml", "seed: " + "9:" * 100 + "9", NUMBER),
    ("k.yaml", "a: 2001-99-99", NUMBER),
    ("l.yaml", "a: !!bool x", NUMBER),
    ("m.yaml", "a: !!timestamp x", NUMBER),
    ("n.yaml", "a: !!binary /w==", "is not supported"),
    ("o.yaml", "a: 1\n---\nb: 2", "one YAML document"),
    (
        "p.yml",
        "a0: &a0 1\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 90)),
        DEEP,
    ),
]


@pytest.mark.parametrize(("name", "text", "pattern"), TEXTS, ids=[text[0] for text in TEXTS])
def test_file_beyond_a_limit_is_named_in_one_sentence(
    tmp_path: Path, name: str, text: str, pattern: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=pattern) as raised:
        load_run_config(tmp_path / name)
    assert name in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "override",
    [
        "environment.options.a=" + "[" * 5000,
        "environment.options.a=" + "[" * 5000 + "]" * 5000,
        "environment.options.a=" + "[" * 100 + "]" * 100,
        'environment.options={"a":' * 1 + '{"a":' * 100_000,
        "environment.options.a=" + "{b = " * 5000 + "1" + "}" * 5000,
        "environment.options={a" + ".a" * 60_000 + " = 1}",
        "seed=" + "1" * 5000,
        "seed=" + "1" * 50,
        "environment.package=\udc9b",
        "environment.options." + "a." * 5000 + "a=1",
        "a" + ".a" * 60_000,
        "environment.options=" + "x" * 100_000,
        "unknown" * 10_000 + "=1",
    ],
    ids=lambda override: override[:30],
)
def test_override_beyond_a_limit_is_refused_in_one_sentence(override: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_run_config(None, [override])
    assert len(str(raised.value)) < 2000


def test_tree_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {"environment": {"options": {}}}
    tree["environment"]["options"]["a"] = tree
    with pytest.raises(ConfigError, match=DEEP):
        make_run_config(tree)


def test_overrides_and_files_are_limited_together(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"environment": {"options": {}}}))
    keys = ".".join("a" * (MAX_DEPTH - 3))
    value = "[" * 10 + "]" * 10
    with pytest.raises(ConfigError, match=DEEP):
        load_run_config(path, [f"environment.options.{keys}={value}"])


def test_documents_within_the_limits_are_read(tmp_path: Path) -> None:
    depth = MAX_DEPTH - 1
    nested_text = "[" * depth + "]" * depth
    texts = {
        "a.json": f'{{"a": {nested_text}}}',
        "a.yaml": f"a: {nested_text}",
        "b.yaml": "base: &base {x: 1}\na:\n  <<: *base\nb: [*base, *base]",
        "a.toml": f"a = {nested_text}\n[{'.'.join('b' * depth)}]",
        "c.yaml": "",
        "b.toml": 'a = "' + "1." * 5000 + '"',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    documents = {name: read_document(tmp_path / name) for name in texts}
    assert documents["a.json"]["a"] == documents["a.yaml"]["a"] == documents["a.toml"]["a"]
    assert documents["b.yaml"]["a"] == documents["b.yaml"]["b"][1] == {"x": 1}
    assert documents["c.yaml"] is None


def test_long_lists_of_mistakes_are_shortened() -> None:
    with pytest.raises(ConfigError, match="and 950 more mistakes") as raised:
        make_run_config({f"unknown{index}": 1 for index in range(1000)})
    assert len(str(raised.value)) < 100_000


class Options(EnvironmentOptions):
    """Options with a JSON object."""

    settings: JsonOption = Field(default_factory=dict)
    """Settings."""


READERS: dict[str, tuple[Callable[[Path], object], list[tuple[str, str, str]]]] = {
    "gateway": (GatewayConfig.read, [text for text in TEXTS if text[0].endswith("toml")]),
    "tenants": (
        lambda path: TenantsFile(path).read(),
        [text for text in TEXTS if text[0].endswith("toml") and text[0] != "i.toml"],
    ),
    "forge": (load_forge_config, [text for text in TEXTS if "yaml" in text[0]]),
    "release": (
        lambda path: read_release_file(path, None),
        [text for text in TEXTS if "yaml" in text[0] and text[0] != "o.yaml"],
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_other_configuration_files_have_the_same_limits(tmp_path: Path, reader: str) -> None:
    read, texts = READERS[reader]
    for name, text, _ in texts:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError) as raised:
            read(tmp_path / name)
        assert name in str(raised.value)
        assert len(str(raised.value)) < 500


@pytest.mark.parametrize("value", ["[" * 5000, '{"a":' * 100_000, "[" * 100 + "]" * 100])
def test_options_of_environments_have_the_same_limits(value: str) -> None:
    readers: list[Callable[[], object]] = [
        lambda: parse_options([f"settings={value}"]),
        lambda: parse_json_options(f'{{"settings": {value}}}'),
        lambda: Options.parse({"settings": value}),
    ]
    for read in readers:
        with pytest.raises(ConfigError) as raised:
            read()
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", ["a.toml", "a.yaml", "a.json"])
def test_byte_order_mark_is_ignored(name: str, tmp_path: Path) -> None:
    texts = {"a.toml": "a = 1", "a.yaml": "a: 1", "a.json": '{"a": 1}'}
    (tmp_path / name).write_text(texts[name], encoding="utf-8-sig")
    assert read_document(tmp_path / name) == {"a": 1}
