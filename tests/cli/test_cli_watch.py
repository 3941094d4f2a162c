"""`ludus watch`: what was said so far, what is said next, and the end."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path

import pytest
from rich.console import Console

from ludus.proto.run_lock import RunLock
from ludus.proto.runs import METRICS_FILE, TRANSCRIPTS_FILE, Transcript
from ludus.services.cli import watch_command
from tests.cli.commands import RunCli
from tests.report.synthetic_run import transcript


def write(folder: Path, *transcripts: Transcript) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS_FILE).touch()
    with (folder / TRANSCRIPTS_FILE).open("a", encoding="utf-8") as file:
        file.writelines(one.model_dump_json() + "\n" for one in transcripts)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where `ludus` finds a run of the name demo."""
    return tmp_path / "runs" / "demo"


def test_of_a_run_that_is_over_the_last_episodes_are_shown(ludus: RunCli, run_dir: Path) -> None:
    write(run_dir, *(transcript(step) for step in range(1, 6)))
    result = ludus("watch", "demo", "--last", "2")
    assert result.code == 0
    assert "step 3 " not in result.out
    assert "step 4 · blackjack" in result.out
    assert result.out.index("step 4 ") < result.out.index("step 5 ")
    assert "hard 15 vs 10" in result.out
    assert '-> action "STAND", reward 1' in result.out
    assert "terminated · return 1 · reward 0.9 of environment 1, brevity −0.1" in result.out


def test_a_reward_that_is_not_made_of_terms_is_the_return(ludus: RunCli, run_dir: Path) -> None:
    write(run_dir, transcript(1).model_copy(update={"terms": {}}))
    assert "terminated · return 1\n" in ludus("watch", "demo").out.replace(" \n", "\n")


def test_what_ended_an_episode_is_shown_and_does_not_steer_the_terminal(
    ludus: RunCli, run_dir: Path
) -> None:
    failed = {"status": "failed", "reward": None, "episode_return": None}
    reason = {"failure": "ValueError: \x1b[2Jno such card"}
    write(run_dir, transcript(1).model_copy(update=failed | reason), transcript(2))
    result = ludus("watch", "demo")
    assert "ValueError: \N{REPLACEMENT CHARACTER}[2Jno such card" in result.out
    assert result.out.count("failure") == 1
    assert "failed · return none" in result.out


def test_it_goes_on_as_long_as_the_run_does(
    ludus: RunCli, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run_dir, transcript(1))
    lock = RunLock.take(run_dir)
    shown: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(watch_command, "POLL_S", 0.01)
    show = watch_command.show_transcript

    def show_and_tell(console: Console, one: Transcript) -> None:
        show(console, one)
        shown.put(one.step)

    monkeypatch.setattr(watch_command, "show_transcript", show_and_tell)

    def train() -> None:
        for step in (2, 3):
            assert shown.get(timeout=60) == step - 1
            write(run_dir, transcript(step))
        lock.release()

    thread = threading.Thread(target=train)
    thread.start()
    result = ludus("watch", str(run_dir))
    thread.join()
    assert [f"step {n} " in result.out for n in (1, 2, 3)] == [True, True, True]


def test_one_environments_episodes_as_they_stand_in_the_file(ludus: RunCli, run_dir: Path) -> None:
    write(run_dir, transcript(1), transcript(2, environment="pong"), transcript(3))
    result = ludus("watch", "demo", "--environment", "blackjack", "--json")
    assert [json.loads(line)["step"] for line in result.out.splitlines()] == [1, 3]


def test_what_a_model_says_does_not_steer_the_terminal(ludus: RunCli, run_dir: Path) -> None:
    write(run_dir, transcript(1, answer="\x1b[2Jgone [bold]"))
    result = ludus("watch", "demo")
    assert "\x1b[2J" not in result.out
    assert "[2Jgone [bold]" in result.out


def test_a_run_that_is_not_there_is_named(ludus: RunCli, run_dir: Path) -> None:
    result = ludus("watch", "dmeo")
    assert result.code == 2
    assert "there is no run 'dmeo'" in result.err
