"""Files of a run folder run no code at a resume, and end it with one sentence.

The attacker also writes the list of files, so that all checksums are right.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ludus.trainer.core.checksums import hash_file
from tests.attack.attacked import make_cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
NETWORK_SETTINGS = (
    *("training.num_steps=2", "training.checkpoint_every_steps=1", "eval.num_games=2"),
    *("eval.num_games_during=0", "environment.baselines=[]"),
)
LANGUAGE_SETTINGS = (
    *("training.num_steps=1", "training.checkpoint_every_steps=1", "eval.num_games=4"),
    *("eval.num_games_during=0", "environment.baselines=[]", "environment.random_policy=null"),
    *("environment.optimal_policy=null", "generator.kind=transformers"),
    *("training.groups_per_step=4", "rollout.num_groups_in_flight=8", "learner.num_minibatches=1"),
    *("learner.warmup_steps=0", "model.warm_start_games=64"),
)
AGENT = "learner/agent.pt"


class Command:
    """An object that creates the file `ran` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch ran",)


def train(folder: Path, example: str, settings: tuple[str, ...], *flags: str) -> tuple[int, str]:
    """Train in `folder`; return the exit code and the output."""
    command = [sys.executable, "-m", "ludus.trainer", "train", *flags]
    command += ["--config", str(EXAMPLES / example)]
    for setting in ("name=run", *settings):
        command += ["--set", setting]
    output_file = folder / "output"
    with output_file.open("wb") as output:
        process = subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=300)
    return process.returncode, output_file.read_text(errors="replace")


def resume_hostile(folder: Path, example: str, settings: tuple[str, ...]) -> str:
    """Resume, which must use an earlier checkpoint or end with one sentence; return the output."""
    exit_code, output = train(folder, example, settings, "--resume")
    assert exit_code in (0, 2), output
    assert "Traceback" not in output, output
    assert not (folder / "ran").exists(), "code of the run folder ran"
    return output


def list_files(checkpoint: Path) -> None:
    """Write the list of files as if they had been written by the run."""
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "files.json"]
    names = {str(path.relative_to(checkpoint)): path for path in paths}
    content = {
        "num_bytes": {name: path.stat().st_size for name, path in names.items()},
        "blake3": {name: hash_file(path) for name, path in names.items()},
    }
    (checkpoint / "files.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def network_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    exit_code, output = train(folder, "cartpole/ppo.toml", NETWORK_SETTINGS)
    assert exit_code == 0, output
    return folder


# -- attacks on a checkpoint -----------------------------------------------------------------


def write_agent(make_content: Callable[[Path], bytes]) -> Callable[[Path], None]:
    """Return an attack that replaces the weights."""

    def attack(checkpoint: Path) -> None:
        (checkpoint / AGENT).write_bytes(make_content(checkpoint))
        list_files(checkpoint)

    return attack


def write_file(name: str, content: bytes) -> Callable[[Path], None]:
    """Return an attack that replaces a file, and lists it unless it is the list."""

    def attack(checkpoint: Path) -> None:
        (checkpoint / name).write_bytes(content)
        if name != "files.json":
            list_files(checkpoint)

    return attack


def replace_path(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return an attack that puts something else than a file in a file's place."""

    def attack(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        make(checkpoint / name)
        if name != "files.json":
            list_files(checkpoint)

    return attack


def change_list(change: Callable[[dict[str, dict[str, Any]]], object]) -> Callable[[Path], None]:
    """Return an attack that changes the list of files."""

    def attack(checkpoint: Path) -> None:
        content = json.loads((checkpoint / "files.json").read_text())
        change(content)
        (checkpoint / "files.json").write_text(json.dumps(content))

    return attack


def change_archive(
    checkpoint: Path, pickled: bytes | None = None, *, is_compressed: bool = False, repeats: int = 0
) -> bytes:
    """Return the archive of the weights with other content, or with a large tensor."""
    source_file, copy_file = io.BytesIO((checkpoint / AGENT).read_bytes()), io.BytesIO()
    if is_compressed:
        torch.save({"a": torch.zeros(1 << 27, dtype=torch.uint8)}, source_file := io.BytesIO())
    method = zipfile.ZIP_DEFLATED if is_compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(source_file) as source, zipfile.ZipFile(copy_file, "w", method) as copy:
        for entry in source.infolist():
            is_pickle = pickled is not None and entry.filename.endswith("data.pkl")
            copy.writestr(entry.filename, pickled if is_pickle else source.read(entry))
        copy.filelist += copy.filelist * repeats
    return copy_file.getvalue()


def call_global(module_name: str, name: str, argument: str) -> bytes:
    """Return a pickle that calls a function with a text, with names from the stack."""
    texts = (module_name, name, argument)
    first, second, third = (b"\x8c" + bytes([len(text.encode())]) + text.encode() for text in texts)
    return b"\x80\x04" + first + second + b"\x93" + third + b"\x85R."


def make_links(checkpoint: Path) -> None:
    (checkpoint.parent / "step-00000009").symlink_to(".")
    (checkpoint.parent / "step-00000010").symlink_to("step-00000010")


CHECKPOINT_ATTACKS: dict[str, Callable[[Path], object]] = {
    "pickle": write_agent(lambda _: pickle.dumps(Command())),
    **{
        f"pickle of protocol {number}": write_agent(
            lambda _, number=number: pickle.dumps({"a": Command()}, protocol=number)
        )
        for number in (0, 2)
    },
    "pickle in the archive": write_agent(
        lambda folder: change_archive(folder, pickle.dumps(Command(), protocol=2))
    ),
    "evaluation": write_agent(
        lambda folder: change_archive(
            folder, call_global("builtins", "eval", "__import__('os').system('touch ran')")
        )
    ),
    "attribute of a module of torch": write_agent(
        lambda folder: change_archive(
            folder, call_global("torch", "serialization.os.system", "touch ran")
        )
    ),
    "pickle in a pickle": write_agent(
        lambda folder: change_archive(folder, call_global("torch.storage", "_load_from_bytes", "x"))
    ),
    "program of torch": write_agent(
        lambda _: torch.jit.script(torch.nn.Identity()).save_to_buffer()
    ),
    "compressed archive": write_agent(lambda f: change_archive(f, is_compressed=True)),
    "archive with many entries of the same bytes": write_agent(
        lambda folder: change_archive(folder, repeats=1000)
    ),
    "end of a file": write_agent(lambda folder: (folder / AGENT).read_bytes()[:-5000]),
    "text": write_agent(lambda _: b"x" * 100_000),
    "another object": write_agent(lambda folder: change_archive(folder, b"\x80\x02K\x05.")),
    "pipe instead of the weights": replace_path(AGENT, os.mkfifo),
    "device instead of the weights": replace_path(AGENT, lambda path: path.symlink_to("/dev/zero")),
    "file from elsewhere": replace_path(AGENT, lambda path: path.symlink_to("/etc/passwd")),
    "pipe instead of the state": replace_path("state.json", os.mkfifo),
    "device instead of the list": replace_path(
        "files.json", lambda path: path.symlink_to("/dev/zero")
    ),
    "path that leaves the folder": change_list(
        lambda files: files["num_bytes"].update({"../../config.json": 1, "/etc/passwd": 1})
    ),
    "wrong checksum": change_list(lambda files: files["blake3"].update({AGENT: "0" * 64})),
    "no checksum of a file": change_list(lambda files: files["blake3"].pop(AGENT)),
    "folder in the list": change_list(lambda files: files["num_bytes"].update({"learner": 4096})),
    "null in the list": change_list(lambda files: files["num_bytes"].update({"a\0b": 1})),
    "surrogates and long names in the list": change_list(
        lambda files: files["num_bytes"].update({"\ud800": 1, "x" * 5000: 1})
    ),
    "deep list": write_file("files.json", b"[" * 1_000_000),
    "large number in the state": write_file(
        "state.json", b'{"streams": 1, "step": 1' + b"0" * 30 + b"}"
    ),
    "negative step": write_file("state.json", b'{"streams": 1, "step": -1}'),
    "deep state": write_file("state.json", b'{"start":' * 500_000),
    "odd names of checkpoints": lambda checkpoint: [
        (checkpoint.parent / name).mkdir()
        for name in ("step-", "step-x", "step-99999999999999999999", "step--1", "step-1\n2")
    ],
    "links": make_links,
}


@pytest.mark.long
@pytest.mark.parametrize("attack", make_cases(CHECKPOINT_ATTACKS))
def test_hostile_checkpoint_of_a_network_runs_no_code(
    network_run: Path, tmp_path: Path, attack: Callable[[Path], object]
) -> None:
    shutil.copytree(network_run / "runs", tmp_path / "runs")
    checkpoints = sorted((tmp_path / "runs/run/checkpoints").iterdir())
    attack(checkpoints[-1])
    settings = (*NETWORK_SETTINGS, "training.num_steps=3")
    output = resume_hostile(tmp_path, "cartpole/ppo.toml", settings)
    is_archive = attack is CHECKPOINT_ATTACKS["compressed archive"]
    assert "values are compressed" in output or not is_archive


@pytest.mark.attack
@pytest.mark.parametrize("is_listed", [False, True])
def test_pickle_as_metadata_of_a_language_model_runs_no_code(
    tmp_path: Path, is_listed: bool
) -> None:
    example = "blackjack/tiny.toml"
    exit_code, output = train(tmp_path, example, LANGUAGE_SETTINGS)
    assert exit_code == 0, output
    [*_, checkpoint] = sorted((tmp_path / "runs/run/checkpoints").iterdir())
    path = checkpoint / "learner/.metadata"
    num_bytes = path.stat().st_size
    path.write_bytes(pickle.dumps(Command()).ljust(num_bytes, b"\0"))
    assert path.stat().st_size == num_bytes
    if is_listed:
        list_files(checkpoint)
    output = resume_hostile(tmp_path, example, (*LANGUAGE_SETTINGS, "training.num_steps=2"))
    assert ".metadata" in output
