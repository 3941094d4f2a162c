"""Commands that read hostile servers, recordings and configurations end in clean short text."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import socketserver
import subprocess
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attack.attacked import (
    LUDUS_PROGRAM,
    AttackedProcess,
    make_cases,
    make_folder,
    run_command,
    serve_env,
)

pytestmark = pytest.mark.slow

TEXT_ENV = "hostile_env:HostileTextEnv"
HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
TEXTS: dict[str, str] = {
    "title": "\x1b]0;EVIL\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\EVIL\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;ZXZpbA==\x1b\\",
    "C1 controls": "\x9b2J\x9d0;EVIL\x9c\x90+q544e\x9c",
    "device control": "\x1bP$q\x22p\x1b\\\x1b_Gf=24\x1b\\\x1b^EVIL\x1b\\\x1bXEVIL\x1b\\",
    "cursor": "\x1b[2J\x1b[1;1HEVIL\x1b[8m\x1b[?1049h\x1bc",
    "keys": "\x1b[?1000h\x1b[>4;1m\x1b[5n\x1b[c",
    "directions": "\u202eEVIL\u2066\u2069\u200f\u061c",
    "no width": "EV\u200bI\u200d\u2060L\ufeff\u00ad\u180e\u3164\u115f",
    "tags": "".join(chr(0xE0000 + ord(letter)) for letter in "EVIL"),
    "variants": "E\U000e0100V\ufe00I\u034fL",
    "lines": "a\rEVIL\x0bEVIL\x0cEVIL\x85EVIL\u2028EVIL\u2029EVIL",
    "backspaces": "good\x08\x08\x08\x08EVIL\x7f\x7f",
    "null": "a\0EVIL",
    "marks": "E" + "\u0301\u0336\u20dd" * 100,
    "private and unassigned": "\ue000\U000f0000\U0010ffff\u0378",
    "surrogates": "\ud83d\ud800",
    "markup": "[link=http://evil.example][red]EVIL[/red][/link]",
}
"""Texts that control a terminal, or hide a part of themselves."""
PLACES: dict[str, str] = {
    "observation": "text = {text!a}",
    "messages": "messages = [{{'role': 'user', 'content': {text!a}}}] * 2",
    "role": "messages = [{{'role': {text!a}, 'content': 'a'}}]",
    "error": "raise ValueError({text!a})",
    "name of an error": "raise type({text!a}.replace(chr(0), ''), (Exception,), {{}})('a')",
    "reward": "reward = {text!a}",
    "key of a message": "messages = [{{'role': 'user', 'content': 'a', {text!a}: {text!a}}}]",
}
"""Code for the hostile environment, with a place for a text."""


def check_clean(output: str) -> None:
    """Check that an output has no character that controls a terminal or hides a text."""
    hidden = {
        character
        for character in output
        if character not in "\n\t" and unicodedata.category(character) in HIDDEN_CATEGORIES
    }
    assert not hidden
    assert not re.search("[\u3164\u115f\u034f\ufe00\U000e0100]", output)
    assert not re.search("[\u0301\u0336\u20dd]{10}", output)


def check_clean_end(outcome: subprocess.CompletedProcess[str]) -> None:
    """Check that a command ended without a traceback, and that its output is clean."""
    check_clean(outcome.stdout + outcome.stderr)
    assert "Traceback" not in outcome.stdout + outcome.stderr


def make_answers() -> str:
    """Return lines that let the hostile environment say each text at each place.

    Each text has its own episode, because a result that cannot be sent ends its episode.
    """
    lines = [
        f"{json.dumps({'code': code.format(text=text)})}\n:new\ny"
        for text in TEXTS.values()
        for code in PLACES.values()
    ]
    calls = [":tools", ":call look {}", ':call look {"a": 1}', ":call \x1b]0;EVIL\x07", ":state"]
    return "\n".join([*lines, *calls, '{"code": "terminated = True"}', "n", ""])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("commands") / "empty")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[AttackedProcess]:
    with serve_env(folder, target=TEXT_ENV) as attacked:
        yield attacked


@pytest.mark.parametrize("wire", make_cases({"gRPC": "grpc", "HTTP": "http"}))
def test_texts_of_a_remote_environment_are_shown_clean(
    server: AttackedProcess, folder: Path, wire: str
) -> None:
    recording = f"{wire}.jsonl"
    address = server.addresses[wire]
    outcome = run_command(
        folder, "env", "play", address, "--record", recording, answers=make_answers()
    )
    assert outcome.returncode == 0
    check_clean_end(outcome)
    assert "[link=http://evil.example]" in outcome.stdout
    assert r"\x1b]0;EVIL\x07" in outcome.stdout
    assert "-- terminated" in outcome.stdout


@pytest.mark.attack
def test_other_commands_show_a_remote_environment_clean(
    server: AttackedProcess, folder: Path
) -> None:
    run_command(folder, "env", "play", server.grpc, "--record", "a.jsonl", answers=make_answers())
    assert (folder / "a.jsonl").exists()
    for arguments in (["replay", "a.jsonl", server.grpc], ["check", server.grpc]):
        outcome = run_command(folder, "env", *arguments)
        assert outcome.returncode in (0, 1, 2)
        check_clean_end(outcome)
    check_clean(server.read_log())


@pytest.mark.attack
def test_texts_do_not_control_a_real_terminal(server: AttackedProcess, folder: Path) -> None:
    terminal, remote_end = pty.openpty()
    process = subprocess.Popen(
        [LUDUS_PROGRAM, "env", "play", server.grpc],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=remote_end,
        stderr=remote_end,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"},
        text=True,
    )
    os.close(remote_end)
    assert process.stdin is not None
    lines = make_answers()
    thread = threading.Thread(target=lambda: (process.stdin.write(lines), process.stdin.close()))
    thread.start()
    output = b""
    with contextlib.suppress(OSError):  # the terminal is closed at the command's end
        while select.select([terminal], [], [], 60)[0]:
            output += os.read(terminal, 65_536)
    thread.join()
    assert process.wait(60) == 0
    os.close(terminal)
    text = output.decode()
    # Only colors, which rich sets, may follow an escape character.
    assert not re.search(r"\x1b(?!\[[0-9;]*m)", text)
    check_clean(re.sub(r"\x1b\[[0-9;]*m|\r\n", "\n", text))
    assert r"\x1b]0;EVIL\x07" in text


ESCAPES = TEXTS["title"] + TEXTS["C1 controls"] + TEXTS["directions"]
RAW_REPLIES: dict[str, bytes] = {
    "error in JSON": b"HTTP/1.1 500 E\r\nContent-Type: application/json\r\n\r\n"
    + json.dumps({"detail": {"message": ESCAPES, "code": ESCAPES}}).encode(),
    "text": b"HTTP/1.1 404 E\r\n\r\n" + ESCAPES.encode(),
    "reason": b"HTTP/1.1 500 \x1b]0;EVIL\x07\x9b2J\r\nContent-Length: 0\r\n\r\n",
    "redirect": b"HTTP/1.1 302 E\r\nLocation: http://\x1b]0;EVIL\x07/\r\nContent-Length: 0\r\n\r\n",
    "no HTTP": b"\x1b]0;EVIL\x07\x9b2J\r\n\r\n",
    "wrong JSON": b"HTTP/1.1 200 E\r\nContent-Type: application/json\r\n\r\n"
    + json.dumps({"name": [ESCAPES], ESCAPES: ESCAPES, "status": ESCAPES}).encode(),
    "deep JSON": b"HTTP/1.1 200 E\r\nContent-Type: application/json\r\n\r\n" + b"[" * 100_000,
    "bytes": b"HTTP/1.1 200 E\r\nContent-Type: application/json\r\n\r\n" + bytes(range(256)),
}


@contextlib.contextmanager
def serve_bytes(reply: bytes) -> Iterator[int]:
    """Serve the same bytes for every request; yield the port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.recv(65_536)
                self.request.sendall(reply)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as tcp_server:
        thread = threading.Thread(target=tcp_server.serve_forever)
        thread.start()
        yield tcp_server.server_address[1]
        tcp_server.shutdown()
        thread.join()


@pytest.mark.parametrize("reply", make_cases(RAW_REPLIES, 0))
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_replies_of_a_hostile_server_are_shown_clean(
    folder: Path, reply: bytes, scheme: str
) -> None:
    with serve_bytes(reply) as port:
        outcome = run_command(folder, "env", "play", f"{scheme}://127.0.0.1:{port}")
    assert outcome.returncode in (1, 2)
    check_clean_end(outcome)
    assert len(outcome.stderr) < 3000


# -- configurations ------------------------------------------------------------------------------

MERGE_CYCLE = "a: &a\n  <<: *a\n"
CONFIGURATIONS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "deep TOML": ("toml", lambda: b"a = " + b"[" * 5000 + b"]" * 5000),
    "deep JSON": ("json", lambda: b"[" * 100_000),
    "alias bomb": (
        "yaml",
        lambda: (
            b"a0: &a0 x\n"
            + b"".join(
                b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 10))
                for n in range(1, 20)
            )
        ),
    ),
    "YAML that contains itself": ("yaml", lambda: b"name: &a [*a]"),
    "lists in tables in TOML": ("toml", lambda: b"a = " + b"[{b = " * 3000 + b"1" + b"}]" * 3000),
    "arrays of tables": ("toml", lambda: b"".join(b"[[a%s]]\n" % (b".a" * n) for n in range(500))),
    "many keys in TOML": ("toml", lambda: b"".join(b"a%d=1\n" % n for n in range(90_000))),
    "many tables": ("toml", lambda: b"".join(b"[a.b%d]\n" % n for n in range(80_000))),
    "lists in objects in JSON": ("json", lambda: b'[{"a":' * 50_000 + b"1" + b"}]" * 50_000),
    "deep JSON in options": (
        "json",
        lambda: b'{"environment":{"options":' + b"[" * 900 + b"]" * 900,
    ),
    "many keys in JSON": ("json", lambda: json.dumps({str(n): 1 for n in range(900_000)}).encode()),
    "flow in YAML": ("yaml", lambda: b"a: " + b"[{b: " * 5000),
    "blocks in YAML": ("yaml", lambda: b"".join(b" " * n + b"a:\n" for n in range(1000))),
    "sequences in YAML": ("yaml", lambda: b"- " * 100_000),
    "merge key that contains itself": ("yaml", lambda: MERGE_CYCLE.encode()),
    "many anchors": ("yaml", lambda: b"".join(b"- &a%d [1]\n" % n for n in range(80_000))),
    "aliases as keys": ("yaml", lambda: b"? &a [x, y]\n: *a\n? {*a : *a}\n: 1"),
    "keys of other types": ("yaml", lambda: b"1: a\ntrue: b\nnull: c\n2001-01-01: d\n1.5: e\n~: f"),
    "objects in YAML": ("yaml", lambda: b"name: !!python/object/apply:os.system ['echo EVIL']"),
    "unknown tag": ("yaml", lambda: b"name: !\x1b[2Jevil x".replace(b"\x1b", b"%1b")),
    "unknown alias": ("yaml", lambda: b"name: *evil"),
    "version of YAML": ("yaml", lambda: b"%YAML 99.9\n---\nname: a"),
    "many documents": ("yaml", lambda: b"---\nname: a\n" * 20_000),
    "sixty": ("yaml", lambda: b"seed: " + b"9:" * 150 + b"9"),
    "long integer in TOML": ("toml", lambda: b"seed = " + b"9" * 400),
    "long integer in JSON": ("json", lambda: b'{"seed": ' + b"9" * 400 + b"}"),
    "long integer in YAML": ("yaml", lambda: b"seed: " + b"9" * 400),
    "long hexadecimal integer": ("toml", lambda: b"seed = 0x" + b"f" * 900_000),
    "infinity": ("toml", lambda: b"[training]\nnum_steps = inf"),
    "NaN in JSON": ("json", lambda: b'{"learner": {"learning_rate": NaN}}'),
    "number beyond floats": ("json", lambda: b'{"learner": {"learning_rate": 1e999}}'),
    "100 MB of TOML": ("toml", lambda: b"# comment\n" * 10_000_000),
    "100 MB of JSON": ("json", lambda: b"[" + b"1," * 50_000_000 + b"1]"),
    "100 MB of YAML": ("yaml", lambda: b"- a\n" * 25_000_000),
    "null bytes": ("toml", lambda: b'name = "a\0b"'),
    "null bytes in JSON": ("json", lambda: b"\0" * 1000),
    "null bytes in YAML": ("yaml", lambda: b"name: a\0b"),
    "escaped null": ("json", lambda: b'{"name": "a\\u0000b"}'),
    "UTF-16 TOML": ("toml", lambda: 'name = "a"'.encode("utf-16")),
    "UTF-16 JSON": ("json", lambda: '{"seed": "a"}'.encode("utf-16")),
    "UTF-16 YAML": ("yaml", lambda: "seed: a".encode("utf-16")),
    "byte order mark": ("json", lambda: '{"seed": "a"}'.encode("utf-8-sig")),
    "no UTF-8": ("toml", lambda: b'name = "\xff\xfe"'),
    "surrogate in a name": ("json", lambda: b'{"name": "\\ud800"}'),
    "surrogate in a package": ("json", lambda: b'{"environment": {"package": "\\ud800"}}'),
    "surrogate in a key": ("json", lambda: b'{"\\ud800": "\\udfff"}'),
    "escapes": ("json", lambda: json.dumps({ESCAPES: ESCAPES, "name": ESCAPES}).encode()),
    "escapes in TOML": ("toml", lambda: b'"\\u001b]0;EVIL\\u0007" = "\\u009b2J"\nname = 1\x1b[2J'),
    "repeated keys in TOML": ("toml", lambda: b"seed = 1\nseed = 2"),
    "repeated tables": ("toml", lambda: b"[training]\n[training]"),
    "date": ("toml", lambda: b"name = 1979-05-27T07:32:00Z\nseed = 07:32:00"),
    "list instead of a table": ("json", lambda: b'[{"name": "a"}]'),
    "text instead of a table": ("yaml", lambda: b"evil"),
    "nothing": ("json", lambda: b""),
}
OVERRIDES: dict[str, str] = {
    "deep list": "environment.options.a=" + "[" * 5000,
    "deep keys": "environment.options" + ".a" * 5000 + "=1",
    "long integer": "seed=" + "9" * 400,
    "infinity": "training.num_steps=inf",
    "not UTF-8": "name=\udcff\udc9b",
    "escapes": f"{ESCAPES}={ESCAPES}",
    "escapes in a value": f"seed={ESCAPES}",
    "no key": "=1",
    "no value": "seed",
    "empty keys": "..=1",
    "attribute": "__class__.__init__=1",
    "key of a number": "seed.a.b=1",
    "lines": "seed=1\nname=2\n[training]\nnum_steps=3",
    "quotes": 'environment.options.a="' + "\\u001b" * 10_000,
    "long text": "name=" + "x" * 100_000,
}


def check_refusal(outcome: subprocess.CompletedProcess[str]) -> None:
    """Check that a command ended with one short error."""
    assert outcome.returncode == 2, outcome.stderr[-2000:]
    check_clean_end(outcome)
    assert len(outcome.stderr) < 20_000
    assert len(re.findall(r"^error: ", outcome.stderr, re.MULTILINE)) == 1
    assert outcome.stderr.count("\n") < 100


@pytest.mark.parametrize("configuration", make_cases(CONFIGURATIONS))
def test_hostile_configuration_is_refused_in_one_sentence(
    folder: Path, configuration: tuple[str, Callable[[], bytes]]
) -> None:
    suffix, make_content = configuration
    path = folder / f"config.{suffix}"
    path.write_bytes(make_content())
    check_refusal(run_command(folder, "train", path.name, "--dry-run", timeout_s=120))


@pytest.mark.parametrize("override", make_cases(OVERRIDES, 0))
def test_hostile_override_is_refused_in_one_sentence(folder: Path, override: str) -> None:
    check_refusal(run_command(folder, "train", "--dry-run", "--set", override, timeout_s=120))


OTHER_FILES: dict[str, tuple[str, bytes, list[str]]] = {
    "gateway": ("a.toml", b"a = " + b"[" * 5000, ["gateway", "--config", "a.toml"]),
    "tenants": (
        "a.toml",
        b"a" + b".a" * 5000 + b"=1",
        ["gateway", "--env", "a=echo_env", "--tenants", "a.toml"],
    ),
    "options of an environment": (
        "a.jsonl",
        b"",
        ["env", "play", "echo_env", "--option", "a=" + "[" * 5000],
    ),
    "data set that is nested": (
        "a.jsonl",
        b'{"prompt": ' + b"[" * 100_000 + b"}\n",
        ["env", "play", "prompts_env", "--option", "path=a.jsonl"],
    ),
    "data set with escapes": (
        "a.jsonl",
        b'{"\\u001b]0;EVIL\\u0007": "\\u009b2J"}\n',
        ["env", "play", "prompts_env", "--option", "path=a.jsonl"],
    ),
    "data set with a long integer": (
        "a.jsonl",
        b'{"prompt": ' + b"9" * 10_000 + b"}\n",
        ["env", "play", "prompts_env", "--option", "path=a.jsonl"],
    ),
    "data set of null bytes": (
        "a.csv",
        b"\0" * 100_000,
        ["env", "play", "prompts_env", "--option", "path=a.csv"],
    ),
    "data set of random Parquet": (
        "a.parquet",
        b"PAR1" + b"\xff" * 1000 + b"PAR1",
        ["env", "play", "prompts_env", "--option", "path=a.parquet"],
    ),
    "recording that is nested": (
        "a.jsonl",
        b'{"format": 1, "steps": ' + b"[" * 100_000 + b"\n",
        ["env", "replay", "a.jsonl"],
    ),
    "recording with escapes": (
        "a.jsonl",
        json.dumps({"format": ESCAPES, ESCAPES: 1, "environment": ESCAPES}).encode(),
        ["env", "replay", "a.jsonl"],
    ),
}


@pytest.mark.parametrize("hostile_file", make_cases(OTHER_FILES, 0))
def test_other_hostile_files_are_refused_in_one_sentence(
    folder: Path, hostile_file: tuple[str, bytes, list[str]]
) -> None:
    name, content, arguments = hostile_file
    (folder / name).write_bytes(content)
    check_refusal(run_command(folder, *arguments, timeout_s=120))
