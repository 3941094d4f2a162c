from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import EpisodeOutcome, summarize
from ludus.env.serving.subprocess import LocalServer
from ludus.env.types import EnvironmentDescription
from ludus.proto.runs import EvalReport, Evaluation
from ludus.proto.wording import GAMES, TASKS
from ludus.services.cli.tables import format_result_cells, make_eval_tables
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def catch_server_address() -> Iterator[str]:
    server = LocalServer("openspiel_env", {"game": "catch"}, max_sessions=300)
    yield server.start().grpc
    server.stop()


def test_serve_runs_until_an_interrupt() -> None:
    server = subprocess.Popen(
        [
            *(sys.executable, "-c", "from ludus.services.cli.app import main; main()"),
            *("env", "serve", "openspiel_env", "--option=game=catch"),
            *("--port=0", "--max-sessions=3"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    address = re.search(r"grpc://\S+", server.stderr.readline())

    async def describe() -> EnvironmentDescription:
        assert address is not None
        async with await AsyncEnvClient.connect(address.group()) as client:
            return await client.describe()

    description = asyncio.run(describe())
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=60)
    assert (description.options["game"], description.max_sessions) == ("catch", 3)
    assert server.returncode == 0


def test_bench_starts_a_server_for_every_policy(ludus: RunCli) -> None:
    result = ludus("env", "bench", "openspiel_env", "--option", "game=blackjack", "--games", "200")
    assert result.code == 0, result.err
    for policy in ("random", "always stand", "dealer rule", "basic strategy"):
        assert policy in result.out
    # The table shows exact returns next to measured returns.
    assert "−0.3927" in result.out
    assert "−0.0428" in result.out


def test_unreported_success_is_printed_as_dashes() -> None:
    unreported_result = summarize([EpisodeOutcome(seed, 17.0, 17) for seed in range(4)])
    cells = format_result_cells(unreported_result, GAMES)
    assert cells == ["4", "–", "–", "–", "17.000", "0.000"]
    failed_result = summarize([EpisodeOutcome(seed, 17.0, 17, success=False) for seed in range(4)])
    assert format_result_cells(failed_result, GAMES)[1] == "0.0%"


@pytest.mark.parametrize(
    ("num_games", "num_requested", "line"),
    [
        (4, None, None),
        (8, None, "8 episodes of 4 tasks; the intervals are over tasks"),
        (4, 400, "4 of 400 episodes were played, one for each task"),
    ],
)
def test_tables_say_how_many_tasks_were_played(
    num_games: int, num_requested: int | None, line: str | None
) -> None:
    result = summarize(
        [EpisodeOutcome(seed, 1.0, 1, task_seed=seed % 4) for seed in range(num_games)]
    )
    report = EvalReport(
        policy=result,
        baselines={},
        temperature=0.0,
        gap_closed=None,
        gap_closed_ci95=None,
        num_games_requested=num_requested,
    )
    _, *lines = make_eval_tables(Evaluation(environments={"rows": report}))
    assert len(lines) == (0 if line is None else 1)
    assert line is None or str(lines[0]).startswith(line)


def test_tables_say_how_many_episodes_are_void() -> None:
    outcomes = [EpisodeOutcome(seed, 1.0 if seed else None, 1) for seed in range(1500)]
    complete_result, result = summarize(outcomes[1:]), summarize(outcomes)
    assert format_result_cells(result, TASKS)[0] == "1,499 of 1,500"
    report = EvalReport(
        policy=complete_result,
        baselines={"random": result},
        temperature=0.5,
        gap_closed=None,
        gap_closed_ci95=None,
    )
    _, line = make_eval_tables(Evaluation(environments={"blackjack": report}))
    assert str(line).startswith("some episodes are void and not counted")


def test_bench_of_a_data_set_says_how_many_tasks_it_has(ludus: RunCli, tmp_path: Path) -> None:
    rows = [{"prompt": f"{index} + 1 = ", "answer": str(index + 1)} for index in range(6)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--option", f"path={path}", "--option", "answer=answer", "--games", "60")
    result = ludus("env", "bench", "prompts_env", *arguments)
    assert result.code == 0, result.err
    assert "6 different tasks; the intervals are over tasks" in result.out


def test_bench_results_agree_with_exact_values(ludus: RunCli, catch_server_address: str) -> None:
    arguments = ("--address", catch_server_address, "--policy", "follow_ball", "--games", "60")
    result = ludus("env", "bench", *arguments)
    assert result.code == 0, result.err
    row = next(line.split() for line in result.out.splitlines() if "follow ball" in line)
    assert row[2:5] == ["60", "100.0%", "3.0%"]
    assert "random" not in result.out


POLICY_MODULE = """
def guess(observation, rng):
    return {"number": rng.choice(observation["legal_actions"])}


def make_policies(options):
    return {"guesser": guess}


def make_policy_list(options):
    return [guess]
"""


@pytest.fixture
def guessing_modules(tmp_path: Path) -> None:
    """Write one module with the environment of docs/environments.md and one with policies."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text("utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "guessing.py").write_text(example)
    (tmp_path / "guesses.py").write_text(POLICY_MODULE)


@pytest.mark.usefixtures("guessing_modules")
def test_custom_policies_are_compared_with_random_play(ludus: RunCli) -> None:
    bench_command = ("env", "bench", "guessing:GuessEnvironment", "--games", "60")
    result = ludus(*bench_command, "--policies", "guesses:make_policies")
    assert result.code == 0, result.err
    assert "random" in result.out and "guesser" in result.out
    result = ludus(*bench_command, "--policies", "guesses:make_policy_list")
    assert result.code == 2
    assert "guesses:make_policy_list(options) must return policies by name" in result.err
    result = ludus(*bench_command, "--policies", "guesses:make_polices")
    assert result.code == 2
    assert "did you mean 'make_policies'?" in result.err


def test_unknown_policy_error_lists_known_policies(
    ludus: RunCli, catch_server_address: str
) -> None:
    result = ludus("env", "bench", "--address", catch_server_address, "--policy", "follow_bal")
    assert result.code == 2
    assert "--policy must be one of random, follow_ball, got 'follow_bal'" in result.err


@pytest.mark.parametrize("command", ["serve", "bench", "check"])
def test_unknown_package_error_suggests_closest_name(ludus: RunCli, command: str) -> None:
    result = ludus("env", command, "openspeil_env")
    assert result.code == 2
    *fork_warnings, message = result.err.splitlines()
    assert message == "error: no environment package 'openspeil_env'; did you mean 'openspiel_env'?"
    # gRPC warns about the fork of `check`, because earlier tests used gRPC in this process.
    assert all("fork_posix.cc" in line for line in fork_warnings)


@pytest.mark.parametrize("command", ["serve", "bench", "check"])
def test_unknown_game_error_suggests_closest_name(ludus: RunCli, command: str) -> None:
    result = ludus("env", command, "openspiel_env", "--option", "game=blackjak")
    assert result.code == 2
    assert "'blackjak'" in result.err
    assert "did you mean" in result.err and "blackjack" in result.err
    assert "Traceback" not in result.err


def test_unknown_package_option_is_named_in_the_error(ludus: RunCli) -> None:
    result = ludus("env", "serve", "openspiel_env", "--option", "gaem=catch")
    assert result.code == 2
    assert "gaem" in result.err


def test_an_option_without_a_value_is_refused(ludus: RunCli) -> None:
    result = ludus("env", "serve", "openspiel_env", "--option", "game")
    assert result.code == 2
    assert "--option must be KEY=VALUE, got 'game'" in result.err


def test_port_in_use_error_contains_the_port_number(ludus: RunCli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = ludus(
            *("env", "serve", "openspiel_env", "--option", "game=catch", "--port", str(port)),
            *("--grpc-port", "0"),
        )
    assert result.code == 2
    assert f"port {port} is in use" in result.err
    assert "Traceback" not in result.err


def test_unreachable_address_error_suggests_starting_a_server(
    ludus: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.services.cli.env_targets.CONNECT_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as closed_listener:
        address = f"grpc://127.0.0.1:{closed_listener.getsockname()[1]}"
    result = ludus("env", "bench", "--address", address)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert address in result.err
    assert "ludus env serve" in result.err


def test_an_address_without_a_scheme_is_refused(ludus: RunCli) -> None:
    result = ludus("env", "bench", "--address", "127.0.0.1:18000")
    assert result.code == 2
    assert "grpc://host:port" in result.err


def test_bench_needs_a_target(ludus: RunCli) -> None:
    result = ludus("env", "bench")
    assert result.code == 2
    assert "TARGET or --address is required" in result.err


def test_options_and_address_are_mutually_exclusive(ludus: RunCli) -> None:
    result = ludus("env", "bench", "--address", "grpc://127.0.0.1:1", "--option", "game=catch")
    assert result.code == 2
    assert "cannot be combined" in result.err


def test_check_prints_every_rule(ludus: RunCli) -> None:
    result = ludus("env", "check", "openspiel_env", "--option", "game=catch")
    assert result.code == 0, result.out
    assert "same_seed_and_actions_give_the_same_episode" in result.out
    assert "broken" not in result.out


def test_a_broken_rule_makes_check_exit_with_1(
    ludus: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openspiel_env.server.openspiel_environment import OpenSpielEnvironment

    original_reset = OpenSpielEnvironment.reset
    monkeypatch.setattr(
        OpenSpielEnvironment, "reset", lambda self, *, seed=None, **options: original_reset(self)
    )
    result = ludus("env", "check", "openspiel_env", "--option", "game=blackjack")
    assert result.code == 1
    rows = [line for line in result.out.splitlines() if "broken" in line]
    assert any("same_seed_and_actions_give_the_same_episode" in row for row in rows)
