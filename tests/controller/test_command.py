"""Error messages and path resolution of `python -m ludus.trainer`."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.proto.config import make_run_config
from ludus.trainer.__main__ import main
from ludus.trainer.driver.checks import resolve_config
from ludus.trainer.run.checkpoint import CheckpointFolder, RunState, find_checkpoint


def test_full_disk_gives_a_short_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "demo" / "state"))

    monkeypatch.setattr("ludus.trainer.driver.commands.train", fail)
    config = tmp_path / "run.json"
    config.write_text("{}")
    assert main(["train", "--config", str(config)]) == 1
    path, output = re.escape(str(tmp_path / "demo" / "state")), capsys.readouterr().err
    pattern = rf"error: '{path}' cannot be written: No space left on device; [\d,]+ bytes are free"
    assert re.fullmatch(pattern + " there; make room\n", output)


def test_checkpoint_is_found_by_path_or_name(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000150"
    CheckpointFolder(tmp_path, num_kept=1).save(RunState(step=150), {})
    assert find_checkpoint(Path("step-00000150"), tmp_path) == checkpoint
    assert find_checkpoint(checkpoint, tmp_path / "other") == checkpoint
    unknown_checkpoint = find_checkpoint(Path("step-1"), tmp_path)
    assert unknown_checkpoint == Path("step-1").absolute()


@pytest.mark.parametrize(
    ("kind", "temperature", "message"),
    [("network", "0.5", "expected 0 .* or 1"), ("language_model", "0.0001", "at least 0.01")],
)
def test_temperature_of_an_evaluation_is_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, temperature: str, message: str
) -> None:
    config = tmp_path / "run.json"
    config.write_text(
        f'{{"kind": "{kind}", "environment": {{"package": "gymnasium:CartPole-v1"}}}}'
    )
    command = ["eval", "--config", str(config), "--temperature", temperature]
    assert main(command) == 2
    assert re.search(rf"eval.temperature.*{message}", capsys.readouterr().err)


@pytest.mark.parametrize("path", ["./here", "~/here"])
def test_model_folder_becomes_absolute(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model = {"kind": "pretrained", "path": path}
    run = make_run_config({"environment": {"package": "math_env"}, "model": model}, [])
    assert resolve_config(run).model.path == str(tmp_path / "here")


SWALLOWING_IMPORT = """
import importlib, os, signal, sys, time
from ludus.trainer import __main__ as command

def import_module(name):
    try:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        time.sleep(60)
    except BaseException:
        pass
    sys.exit("the signal was lost")

importlib.import_module = import_module
sys.exit(command.main(["check", "--config", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM"])
def test_signal_during_imports_is_not_lost(tmp_path: Path, signal_name: str) -> None:
    """A library may handle all errors of its imports, including KeyboardInterrupt."""
    config = Path(__file__).parents[2] / "examples/blackjack/tiny.toml"
    command = [sys.executable, "-c", SWALLOWING_IMPORT, str(config), signal_name]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (130, "")


@pytest.mark.slow
def test_start_that_inherits_ignored_signals_stops_on_sigint(tmp_path: Path) -> None:
    """A shell ignores SIGINT for commands in the background."""
    (tmp_path / "waiting.py").write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
        "raise SystemExit('the signal was ignored')\n"
    )
    example = Path(__file__).parents[2] / "examples/blackjack/tiny.toml"
    command = [sys.executable, "-m", "ludus.trainer", "check", "--config", str(example)]
    result = subprocess.run(
        [*command, "--set", "environment.policy_chart=waiting:chart"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (result.returncode, result.stderr) == (130, "")


@pytest.mark.parametrize(
    ("capabilities", "dtype", "is_warned"),
    [
        ({"architecture": "x86_64", "avx2": True}, "bfloat16", True),
        ({"architecture": "x86_64", "avx2": True}, "float32", False),
        ({"architecture": "x86_64", "avx512_bf16": True}, "bfloat16", False),
        ({"architecture": "x86_64", "amx_bf16": True}, "bfloat16", False),
        ({"architecture": "aarch64"}, "bfloat16", False),
    ],
)
def test_slow_bfloat16_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    capabilities: dict[str, object],
    dtype: str,
    is_warned: bool,
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    resolve_config(make_run_config({"learner": {"dtype": dtype}}))
    assert ("no instructions for bfloat16" in capsys.readouterr().err) == is_warned


@pytest.mark.parametrize(
    ("num_gpus", "learner_gpus", "advice"),
    [
        (0, 0, None),
        (1, 0, "num_gpus_per_rank = 0.5"),
        (2, 0, "num_gpus_per_rank = 1"),
        (1, 1, None),
    ],
)
def test_unused_gpus_are_reported_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_gpus: int,
    learner_gpus: int,
    advice: str | None,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    sections = {
        "environment": {"package": "math_env"},
        "model": {"kind": "pretrained", "path": "Qwen/Qwen3-1.7B"},
        "learner": {"num_gpus_per_rank": learner_gpus},
    }
    resolve_config(make_run_config(sections))
    output = capsys.readouterr().err
    assert output.count("but the run uses none") == (advice is not None)
    assert (advice or "") in output
