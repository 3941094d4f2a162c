from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.env.serving.subprocess import LocalServer, ServerAddresses
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def catch_server() -> Iterator[ServerAddresses]:
    server = LocalServer("openspiel_env", {"game": "catch"}, max_sessions=6)
    yield server.start()
    server.stop()


def test_target_is_checked_in_process_and_over_the_wire(ludus: RunCli) -> None:
    result = ludus("env", "check", "gymnasium:FrozenLake-v1", "--seeds", "4", "--steps", "10")
    assert result.code == 0, result.out
    rows = [line.split() for line in result.out.splitlines()]
    assert ["environment", "reset_has_no_reward", "ok"] in rows
    assert ["wire", "a_repeated_step_returns_its_first_result", "ok"] in rows
    assert ["wire", "a_full_server_refuses_with_a_code", "ok"] in rows


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_check_does_not_change_a_running_server(
    ludus: RunCli, catch_server: ServerAddresses, wire: str
) -> None:
    for _ in range(2):
        address = getattr(catch_server, wire)
        result = ludus("env", "check", address, "--json", "--seeds", "3", "--wait", "30")
        assert result.code == 0, result.out
        report = json.loads(result.out)
        assert report["ok"]
        assert {check["about"] for check in report["checks"]} == {"wire"}
        assert {check["verdict"] for check in report["checks"]} == {"ok"}


UNSEEDED_MODULE = """
from openspiel_env.server.openspiel_environment import OpenSpielEnvironment


class UnseededEnvironment(OpenSpielEnvironment):
    def reset(self, *, seed=None, **options):
        return super().reset()
"""


def test_json_output_contains_broken_rules(ludus: RunCli, tmp_path: Path) -> None:
    (tmp_path / "unseeded.py").write_text(UNSEEDED_MODULE)
    arguments = (
        "unseeded:UnseededEnvironment",
        "--option",
        "game=blackjack",
        "--json",
        "--seeds",
        "3",
    )
    result = ludus("env", "check", *arguments)
    assert result.code == 1
    report = json.loads(result.out)
    assert not report["ok"]
    broken_rules = {(c["about"], c["rule"]) for c in report["checks"] if c["verdict"] == "broken"}
    assert ("environment", "same_seed_and_actions_give_the_same_episode") in broken_rules
    assert ("wire", "same_seed_and_actions_give_the_same_episode") in broken_rules


def test_unreachable_address_error_suggests_starting_a_server(ludus: RunCli) -> None:
    result = ludus("env", "check", "grpc://127.0.0.1:1", "--wait", "0.2")
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert "ludus env serve" in result.err


def test_options_cannot_be_combined_with_an_address(ludus: RunCli) -> None:
    result = ludus("env", "check", "grpc://127.0.0.1:1", "--option", "game=catch")
    assert result.code == 2
    assert "cannot be combined" in result.err


@pytest.mark.parametrize("command", ["serve", "check", "play", "bench"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gymnasium:CartPol-v1", "did you mean 'CartPole-v1'?"),
        ("openspiel_env:OpenSpiel", "did you mean 'OpenSpielEnv'?"),
        ("no_such_module:Class", "no module 'no_such_module'"),
    ],
)
def test_every_command_explains_an_invalid_target(
    ludus: RunCli, command: str, target: str, message: str
) -> None:
    result = ludus("env", command, target)
    assert result.code == 2
    # gRPC may first warn about the fork of `check`, because other tests used gRPC in this process.
    assert "error: " in [line[:7] for line in result.err.splitlines()]
    assert message in result.err


def test_bench_without_policies_plays_random_actions(ludus: RunCli) -> None:
    result = ludus("env", "bench", "gymnasium:Blackjack-v1", "--games", "100")
    assert result.code == 0, result.err
    assert "random" in result.out


BROKEN_MODULE = """
import threading

from ludus.env import Tool
from openspiel_env.server.openspiel_environment import OpenSpielEnvironment


class CatchEnvironment(OpenSpielEnvironment):
    def __init__(self):
        super().__init__(game="catch")


class UndescribedTool(CatchEnvironment):
    @property
    def tools(self):
        return [Tool("look")]


class FailingClose(CatchEnvironment):
    def close(self):
        raise OSError("the device is busy")


class HangingStep(CatchEnvironment):
    def step(self, action):
        threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("name", "rule", "detail"),
    [
        ("UndescribedTool", "a_server_of_it_starts", "'description'"),
        ("FailingClose", "it_can_be_created_and_closed", "the device is busy"),
    ],
)
def test_environment_error_is_reported_as_a_broken_rule(
    ludus: RunCli, tmp_path: Path, name: str, rule: str, detail: str
) -> None:
    module = f"broken_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(BROKEN_MODULE)
    result = ludus("env", "check", f"{module}:{name}", "--json", "--seeds", "2", "--steps", "3")
    assert result.code == 1, result.err
    assert "Traceback" not in result.err
    checks = {check["rule"]: check for check in json.loads(result.out)["checks"]}
    assert checks[rule]["verdict"] == "broken"
    assert detail in checks[rule]["detail"]


@pytest.mark.long
def test_hanging_environment_is_detected_in_process_and_over_the_wire(
    ludus: RunCli, tmp_path: Path
) -> None:
    (tmp_path / "broken_hanging.py").write_text(BROKEN_MODULE)
    arguments = ("--json", "--seeds", "2", "--steps", "3", "--timeout", "1")
    result = ludus("env", "check", "broken_hanging:HangingStep", *arguments)
    assert result.code == 1, result.err
    checks = json.loads(result.out)["checks"]
    for subject in ("environment", "wire"):
        broken_checks = [c for c in checks if (c["about"], c["verdict"]) == (subject, "broken")]
        assert len(broken_checks) == 3
        assert {c["verdict"] for c in checks if c["about"] == subject} >= {"ok", "not tried"}
    assert any("broken_hanging.py" in check["detail"] for check in checks)
