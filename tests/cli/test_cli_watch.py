"""`ludus watch` on finished and running runs."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from ludus.proto.run_lock import RunLock
from ludus.proto.runs import METRICS_FILE, TRANSCRIPTS_FILE, Transcript, TranscriptMessage
from ludus.services.cli import run_folder_commands
from ludus.services.cli.console import get_stdout, make_table
from tests.cli.commands import RunCli
from tests.report.synthetic_run import transcript


def write_run(folder: Path, *transcripts: Transcript) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS_FILE).touch()
    with (folder / TRANSCRIPTS_FILE).open("a", encoding="utf-8") as file:
        file.writelines(episode.model_dump_json() + "\n" for episode in transcripts)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the folder of the run `demo`."""
    return tmp_path / "runs" / "demo"


def test_watch_of_a_finished_run_prints_the_last_episodes(ludus: RunCli, run_dir: Path) -> None:
    write_run(run_dir, *(transcript(step) for step in range(1, 6)))
    result = ludus("watch", "demo", "--last", "2")
    assert result.code == 0
    assert "step 3 " not in result.out
    assert "step 4 · blackjack" in result.out
    assert result.out.index("step 4 ") < result.out.index("step 5 ")
    assert "hard 15 vs 10" in result.out
    assert '-> action "STAND", reward 1' in result.out
    assert "terminated · return 1 · reward 0.9 of environment 1, brevity −0.1" in result.out


def test_results_after_the_last_completion_are_shown(ludus: RunCli, run_dir: Path) -> None:
    result = TranscriptMessage(role="tool", text='{"right":true}')
    write_run(run_dir, transcript(1).model_copy(update={"unanswered": (result,)}))
    output = ludus("watch", "demo").out
    assert output.index('-> action "STAND"') < output.index('{"right":true}')
    assert output.index('{"right":true}') < output.index("terminated · return 1")


def test_episode_without_reward_terms_shows_the_return(ludus: RunCli, run_dir: Path) -> None:
    write_run(run_dir, transcript(1).model_copy(update={"terms": {}}))
    assert "terminated · return 1\n" in ludus("watch", "demo").out.replace(" \n", "\n")


@pytest.mark.parametrize(("success", "text"), [(True, "success"), (False, "no success")])
def test_success_of_an_episode_is_shown(
    ludus: RunCli, run_dir: Path, success: bool, text: str
) -> None:
    write_run(run_dir, transcript(1).model_copy(update={"terms": {}, "success": success}))
    assert f"terminated · return 1 · {text}" in ludus("watch", "demo").out


def test_a_failure_reason_is_shown_with_escaped_control_characters(
    ludus: RunCli, run_dir: Path
) -> None:
    fields = {"status": "failed", "reward": None, "episode_return": None}
    failure = {"failure": "ValueError: \x1b[2Jno such card"}
    write_run(run_dir, transcript(1).model_copy(update=fields | failure), transcript(2))
    result = ludus("watch", "demo")
    assert r"ValueError: \x1b[2Jno such card" in result.out
    assert result.out.count("failure") == 1
    assert "failed · return none" in result.out


def test_watch_continues_until_the_run_ends(
    ludus: RunCli, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(run_dir, transcript(1))
    lock = RunLock.take(run_dir)
    shown_steps: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(run_folder_commands, "POLL_INTERVAL_S", 0.01)
    show_transcript = run_folder_commands.show_transcript

    def show_and_record(console: Console, episode: Transcript) -> None:
        show_transcript(console, episode)
        shown_steps.put(episode.step)

    monkeypatch.setattr(run_folder_commands, "show_transcript", show_and_record)

    def continue_run() -> None:
        for step in (2, 3):
            assert shown_steps.get(timeout=60) == step - 1
            write_run(run_dir, transcript(step))
        lock.release()

    thread = threading.Thread(target=continue_run)
    thread.start()
    result = ludus("watch", str(run_dir))
    thread.join()
    assert [f"step {n} " in result.out for n in (1, 2, 3)] == [True, True, True]


def test_json_output_is_filtered_by_environment(ludus: RunCli, run_dir: Path) -> None:
    write_run(run_dir, transcript(1), transcript(2, environment="pong"), transcript(3))
    result = ludus("watch", "demo", "--environment", "blackjack", "--json")
    assert [json.loads(line)["step"] for line in result.out.splitlines()] == [1, 3]


def test_control_characters_of_a_model_are_escaped(ludus: RunCli, run_dir: Path) -> None:
    write_run(run_dir, transcript(1, answer="\x1b[2Jgone [bold]"))
    result = ludus("watch", "demo")
    assert "\x1b[2J" not in result.out
    assert r"\x1b[2Jgone [bold]" in result.out


def test_every_text_of_an_episode_is_shown_without_hidden_characters(
    ludus: RunCli, run_dir: Path
) -> None:
    hostile = "\x1b]0;t\x07\x9b2J\u202e\nforged"
    episode = transcript(1, environment=hostile, answer=hostile)
    message = TranscriptMessage(role=hostile, text=hostile)
    turn = episode.turns[0].model_copy(update={"shown": (message,), "action": {hostile: hostile}})
    fields = {"turns": (turn,), "terms": {hostile: 1.0, "b": 0.0}, "failure": hostile}
    write_run(run_dir, episode.model_copy(update=fields))
    result = ludus("watch", "demo")
    assert result.out.replace("\n", "").isprintable()
    assert result.out.count(r"\x1b]0;t\x07\x9b2J\u202e") >= 6
    # Only texts of a message, of the policy and of a failure may have several lines.
    assert sum(line.lstrip().startswith("forged") for line in result.out.splitlines()) == 3


def test_json_of_an_episode_has_no_hidden_characters(ludus: RunCli, run_dir: Path) -> None:
    write_run(run_dir, transcript(1, answer="\x9b2J\u202e"))
    result = ludus("watch", "demo", "--json")
    assert result.out.rstrip("\n").isprintable()
    assert json.loads(result.out)["turns"][0]["answer"] == "\x9b2J\u202e"


def test_tables_have_no_hidden_characters(capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table("policy", title="\x1b[2J")
    table.add_row(Text("\x9b2J\u202e"))
    get_stdout().print(table)
    output = capsys.readouterr().out
    assert output.replace("\n", "").isprintable()
    assert r"\x9b2J\u202e" in output


def test_missing_run_is_reported_by_name(ludus: RunCli, run_dir: Path) -> None:
    result = ludus("watch", "dmeo")
    assert result.code == 2
    assert "there is no run 'dmeo'" in result.err


def test_error_messages_have_no_hidden_characters(ludus: RunCli, run_dir: Path) -> None:
    result = ludus("watch", "\x1b[2J\u202e\nerror: forged")
    assert result.err.startswith("error: there is no run '\\x1b[2J\\u202e\n  error: forged'")
