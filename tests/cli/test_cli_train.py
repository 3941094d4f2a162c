from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.config.load import load_run_config
from ludus.proto.runs import Evaluation
from ludus.services.cli import train_command, trainer_process
from ludus.services.cli.run_plan import list_plan_lines
from tests.cli.commands import FAKE_TRAINER_PATH, RunCli

pytestmark = pytest.mark.slow

UseFakeTrainer = Callable[[str], None]


def test_dry_run_prints_the_resolved_configuration_and_starts_nothing(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer, tmp_path: Path
) -> None:
    use_fake_trainer("succeeds")
    options = ("--set", "training.num_steps=7", "--set", "name=mine")
    result = ludus("train", "--dry-run", "--json", *options)
    config = LanguageModelRun.model_validate(json.loads(result.out))
    assert result.code == 0
    assert (config.training.num_steps, config.name) == (7, "mine")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_the_settings_that_the_trainer_has_resolved(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer
) -> None:
    use_fake_trainer("resolves")
    config = json.loads(ludus("train", "--dry-run", "--json", "--set", "name=mine").out)
    assert (config["name"], config["rollout"]["invalid_action_reward"]) == ("mine", -3.0)


def test_dry_run_shows_the_run_on_one_screen_and_ends_with_ready(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer, tmp_path: Path
) -> None:
    use_fake_trainer("resolves")
    settings = {
        "name": "mine",
        "training.num_steps": 7,
        "training.groups_per_step": 3,
        "rollout.group_size": 5,
        "rollout.max_turns": 1,
        "eval.num_games": 1234,
    }
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    result = ludus("train", "--dry-run", *options)
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert result.code == 0
    assert lines["training"] == "7 steps · 3 groups of 5 episodes per step = 15 · 105 in all"
    assert lines["episodes"].startswith("at most 1 turn of ")
    assert lines["evaluation"].startswith("1,234 episodes at the end")
    assert lines["folder"] == "runs/mine"
    # Two steps may be sampled at the same time.
    assert "at most 30 episodes at a time" in lines["sampling"]
    # 4 bytes for each of 1,000 parameters and 100 adapters, their gradients and two moments.
    assert "1,000 parameters, of which LoRA trains 100" in lines["model"]
    assert (
        "and the best are kept · 5.6 kB each, 22.4 kB while one is written" in lines["checkpoints"]
    )
    parts = "activations 1 GiB, weights 512 MiB"
    assert lines["learner"] == f"rank  at most 1.5 GiB of 2 GiB of GPU · {parts}"
    assert lines["node"] == (
        "at most 1.5 GiB of 1 MiB of main memory, which may not fit: set learner.dtype = "
        f"'bfloat16' · {parts}"
    )
    assert "not measured: it depends on the lengths of the episodes" in lines["step"]
    assert list(lines)[-1] == "ready"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("step_s", "text"),
    [
        (0.0724, "72 ms, measured on this machine with the initial networks"),
        (1.96, "2.0 s, measured on this machine with the initial networks"),
        (None, "not measured: a step may take longer than 3.0 s"),
    ],
)
def test_plan_of_networks_contains_the_time_of_a_step(step_s: float | None, text: str) -> None:
    run = load_run_config(Path(__file__).parents[2] / "examples" / "cartpole" / "ppo.toml")
    assert dict(list_plan_lines(run, None, None, step_s))["step time"] == text


def test_json_without_dry_run_starts_nothing(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer, tmp_path: Path
) -> None:
    use_fake_trainer("succeeds")
    result = ludus("train", "--json")
    assert result.code == 2
    assert "add --dry-run" in result.err
    assert list(tmp_path.iterdir()) == []


def test_dry_run_shows_no_password_of_a_server(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer
) -> None:
    use_fake_trainer("succeeds")
    address = "http://user:secret@127.0.0.1:8000"
    options = ("--set", "environment.kind=remote", "--set", f"environment.address={address}")
    result = ludus("train", "--dry-run", *options)
    assert "127.0.0.1:8000" in result.out
    assert "secret" not in result.out


def test_dry_run_shows_the_limits_of_the_environments(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer
) -> None:
    use_fake_trainer("succeeds")
    options = ("--set", "environment.package=math_env", "--set", "environment.max_turns=77")
    assert "at most 77 turns of" in ludus("train", "--dry-run", *options).out


def test_dry_run_that_is_refused_is_not_ready(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer
) -> None:
    use_fake_trainer("refuses")
    result = ludus("train", "--dry-run")
    assert (result.code, result.out) == (2, "")


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.toml", "a = " + "[" * 5000 + "]" * 5000),
        ("deep.json", "[" * 100_000),
        ("cycle.yaml", "environment: &a {options: {a: *a}}"),
    ],
)
def test_configuration_beyond_a_limit_ends_with_one_line(
    ludus: RunCli, tmp_path: Path, name: str, text: str, options: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(text)
    result = ludus("train", str(tmp_path / name), *options)
    assert result.code == 2
    assert name in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.num_stpes=3", ["training.num_stpes", "did you mean 'num_steps'?"]),
        ("training.num_steps=many", ["training.num_steps", "'many'"]),
        ("learner.num_minibatches=5", ["learner.num_minibatches = 5", "groups_per_step"]),
        ("environment.kind=elsewhere", ["environment.kind", "'elsewhere'"]),
        ("training", ["--set expected section.field=value", "'training'"]),
    ],
)
def test_invalid_configuration_is_refused_with_field_value_and_remedy(
    ludus: RunCli,
    use_fake_trainer: UseFakeTrainer,
    override: str,
    expected: list[str],
    tmp_path: Path,
) -> None:
    use_fake_trainer("crashes")
    result = ludus("train", "--set", override)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert all(text in result.err for text in expected)
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("environment.package=openspeil_env", "did you mean 'openspiel_env'?"),
        ('environment.options={"game": "blackjak"}', "blackjack"),
        ('environment.options={"gaem": "catch"}', "gaem"),
    ],
)
def test_invalid_environment_is_refused_before_the_trainer_starts(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer, override: str, expected: str, tmp_path: Path
) -> None:
    use_fake_trainer("crashes")
    result = ludus("train", "--set", override)
    assert result.code == 2
    assert result.err.startswith("error: ") and expected in result.err
    assert list(tmp_path.iterdir()) == []


def test_missing_configuration_file_is_reported_by_name(ludus: RunCli) -> None:
    result = ludus("train", "no/such.toml")
    assert result.code == 2
    assert "configuration 'no/such.toml' does not exist" in result.err


def test_resume_and_overwrite_exclude_each_other(ludus: RunCli) -> None:
    for resume in ("--resume", "--resume=auto"):
        result = ludus("train", resume, "--overwrite")
        assert result.code == 2
        assert "cannot be combined" in result.err


@pytest.mark.parametrize(
    ("flags", "trainer_flags"),
    [
        (["--resume"], ["--resume=always"]),
        (["--resume=auto"], ["--resume=auto"]),
        (["--overwrite"], ["--overwrite"]),
        ([], []),
    ],
)
def test_resume_and_overwrite_flags_are_passed_to_the_trainer(
    ludus: RunCli,
    use_fake_trainer: UseFakeTrainer,
    tmp_path: Path,
    flags: list[str],
    trainer_flags: list[str],
) -> None:
    use_fake_trainer("succeeds")
    # --resume must not consume the path that follows it as a value.
    config_path = tmp_path / "run.json"
    config_path.write_text(json.dumps({"name": "demo", "training": {"num_steps": 1}}))
    result = ludus("train", *flags, str(config_path))
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "runs/demo/flags").read_text()) == trainer_flags


def test_invalid_value_of_resume_is_refused(ludus: RunCli) -> None:
    result = ludus("train", "--resume=perhaps")
    assert result.code == 2
    assert "perhaps" in result.err and "Traceback" not in result.err


def test_successful_run_prints_progress_and_one_table_and_writes_a_report(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer, tmp_path: Path
) -> None:
    use_fake_trainer("succeeds")
    result = ludus("train", "--set", "training.num_steps=3", "--set", "name=demo")
    assert result.code == 0, result.err
    # stderr contains progress and the warnings of the trainer, but not its other output.
    assert "step 3/3" in result.err
    assert "wins 40.1% (39.1 to 41.1%)" in result.err
    assert "lost episodes 3" in result.err
    assert result.err.count("warning: vLLM is not installed here") == 1
    assert "noise" not in result.err + result.out
    for expected in (
        "policy before training",
        "policy after training",
        "basic strategy",
        "gap closed  91.2% (88.1 to 94.3%, 95%)",
        "300 episodes in 42",
        "transformers engine",
        "7 weight syncs, 0 canary failures",
        "runs/demo/report.html",
        "ludus eval runs/demo",
    ):
        assert expected in result.out
    assert (tmp_path / "runs/demo/report.html").read_text().startswith("<!doctype html>")


def test_error_of_the_trainer_is_printed_once_and_in_full(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer
) -> None:
    use_fake_trainer("refuses")
    result = ludus("train")
    assert result.code == 2
    assert (
        result.err.count("error: 'runs/demo' already contains a run\n  continue with --resume\n")
        == 1
    )
    assert "end" not in result.err.splitlines()


def test_trainer_crash_prints_the_last_output_and_the_exit_code(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer
) -> None:
    use_fake_trainer("crashes")
    result = ludus("train")
    assert result.code == 1
    assert "ValueError: no gradient" in result.err
    assert "the trainer exited with exit code 1" in result.err


def test_slowly_collected_trainer_output_is_printed(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect_output = trainer_process.collect_output

    def collect_slowly(*arguments: Any) -> None:
        time.sleep(1.2)
        collect_output(*arguments)

    monkeypatch.setattr(trainer_process, "collect_output", collect_slowly)
    monkeypatch.setattr(trainer_process, "POLL_INTERVAL_S", 0.01)
    use_fake_trainer("refuses")
    result = ludus("train")
    assert result.code == 2
    assert "continue with --resume" in result.err


def test_a_killed_trainer_is_reported_as_killed(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer
) -> None:
    use_fake_trainer("dies")
    result = ludus("train")
    assert result.code == 1
    assert "the trainer exited with signal 9" in result.err


def test_eval_passes_options_to_the_trainer_and_prints_the_report(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer, tmp_path: Path
) -> None:
    use_fake_trainer("succeeds")
    ludus("train", "--set", "training.num_steps=1", "--set", "name=demo")
    result = ludus("eval", "runs/demo", "--games", "4321", "--temperature", "0")
    assert result.code == 0, result.err
    assert "at temperature 0" in result.out
    assert "4,321" in result.out
    assert "random" in result.out
    evaluation = Evaluation.model_validate_json((tmp_path / "runs/demo/eval.json").read_bytes())
    assert evaluation.environments["openspiel"].temperature == 0


def test_mixed_run_and_eval_print_a_table_for_every_environment(
    ludus: RunCli, use_fake_trainer: UseFakeTrainer, tmp_path: Path
) -> None:
    use_fake_trainer("succeeds")
    options_by_environment = {"easy": {"game": "catch"}, "hard": {"game": "blackjack"}}
    config_path = tmp_path / "mixed.json"
    environments = {name: {"options": options} for name, options in options_by_environment.items()}
    config_path.write_text(json.dumps({"name": "mixed", "environments": environments}))
    train_result = ludus("train", str(config_path), "--set", "training.num_steps=1")
    assert train_result.code == 0, train_result.err
    eval_result = ludus("eval", "runs/mixed")
    assert eval_result.code == 0, eval_result.err
    for out, titles in (
        (train_result.out, ("mixed, easy", "mixed, hard")),
        (eval_result.out, ("easy, at temperature 1", "hard, at temperature 1")),
    ):
        assert all(title in out for title in titles)
        assert out.count("gap closed  91.2% (88.1 to 94.3%, 95%)") == 2
    # An invalid option of any environment is reported before anything starts.
    result = ludus(
        "train", str(config_path), "--set", 'environments.hard.options={"gaem": "catch"}'
    )
    assert result.code == 2
    assert "gaem" in result.err


def test_eval_of_a_folder_without_a_run_is_refused(ludus: RunCli, tmp_path: Path) -> None:
    result = ludus("eval", str(tmp_path))
    assert result.code == 2
    assert "is not a run folder, because it has no config.json" in result.err
    result = ludus("eval", "runs/no-such-run")
    assert result.code == 2
    assert "there is no run folder 'runs/no-such-run' in the working folder '" in result.err


def start_cli(folder: Path, scenario: str, grace_s: float = 15.0) -> subprocess.Popen[str]:
    """Start `ludus train` in a child process, and wait until the fake trainer runs."""
    command = [sys.executable, str(FAKE_TRAINER_PATH), scenario]
    program = (
        "from ludus.services.cli import app, trainer_process as t\n"
        f"t.build_trainer_command = lambda arguments: [*{command!r}, *arguments]\n"
        f"t.STOP_GRACES_S = ({grace_s},) * 3 + (0.0,)\n"
        "import sys; sys.argv = ['ludus', 'train', '--set', 'name=demo']\n"
        "app.main()\n"
    )
    cli = subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not read_pids(folder):
        assert cli.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return cli


def read_pids(folder: Path) -> list[int]:
    path = folder / "runs/demo/pids"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_stop_signal_reaches_the_trainer_once_and_leaves_no_process(
    tmp_path: Path, stop_signal: signal.Signals
) -> None:
    cli = start_cli(tmp_path, "waits", grace_s=600.0)
    trainer_pids = read_pids(tmp_path)
    # A terminal signals its foreground process group, which does not include the trainer.
    cli.send_signal(stop_signal)
    _, err = cli.communicate(timeout=120)
    assert cli.returncode == 130
    assert "stopping, writing a checkpoint" in err
    # The fake trainer has written no checkpoint.
    assert "no checkpoint was written yet; the same command starts again" in err
    assert "Traceback" not in err
    assert (tmp_path / "runs/demo/signals").read_text() == str(int(stop_signal))
    assert not any(is_running(pid) for pid in trainer_pids)


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_trainer_that_ignores_a_stop_is_killed_with_its_process_group(tmp_path: Path) -> None:
    cli = start_cli(tmp_path, "never_stops", grace_s=0.5)
    trainer_pids = read_pids(tmp_path)
    assert all(os.getpgid(pid) == trainer_pids[0] for pid in trainer_pids)
    cli.send_signal(signal.SIGINT)
    _, err = cli.communicate(timeout=120)
    assert cli.returncode == 130
    assert "killed; " in err
    assert not any(is_running(pid) for pid in trainer_pids)


def test_stopped_run_advises_resume_only_with_a_complete_checkpoint(tmp_path: Path) -> None:
    assert "starts again" in train_command.advise_next_command(tmp_path)
    (tmp_path / "checkpoints/step-00000005.partial").mkdir(parents=True)
    assert "starts again" in train_command.advise_next_command(tmp_path)
    (tmp_path / "checkpoints/step-00000005").mkdir()
    assert train_command.advise_next_command(tmp_path).endswith("config.json --resume")


def test_trainer_starts_as_a_module_of_the_current_python() -> None:
    command = trainer_process.build_trainer_command(["train", "--config", "c.json"])
    assert command == [sys.executable, "-m", "ludus.trainer", "train", "--config", "c.json"]


def test_scale_reports_an_unwritable_control_file(ludus: RunCli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "control.json").mkdir()
    result = ludus("scale", str(tmp_path), "--workers", "2")
    assert result.code == 2
    assert "control.json' cannot be written (Is a directory)" in " ".join(result.err.split())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "control.json", "metrics.jsonl"]
