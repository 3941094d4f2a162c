from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.env.recording.format import read_recording
from ludus.env.serving.subprocess import LocalServer
from tests.cli.commands import Outcome, RunCli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FROZEN_LAKE = ("gymnasium:FrozenLake-v1", "--option", "is_slippery=false", "--seed", "3")
GOAL_ACTIONS = ["RIGHT", "RIGHT", "DOWN", "DOWN", "DOWN", "RIGHT"]
PlayFunction = Callable[..., Outcome]
SHOP_ENV = """
import gymnasium
from gymnasium import spaces

class Shop(gymnasium.Env):
    observation_space = spaces.Discrete(9)
    action_space = spaces.Dict(item=spaces.Discrete(3), price=spaces.Box(0.0, 9.0, (1,)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_sold = 0
        return 0, {}

    def step(self, action):
        self.num_sold += 1
        return self.num_sold, 1.0, False, False, {}

gymnasium.register("Shop-v0", Shop)
"""


class _InterruptedInput(io.StringIO):
    """Standard input that raises KeyboardInterrupt after the last line."""

    def readline(self, size: int | None = -1) -> str:
        line = super().readline()
        if not line:
            raise KeyboardInterrupt
        return line


@pytest.fixture
def play(ludus: RunCli, monkeypatch: pytest.MonkeyPatch) -> PlayFunction:
    """Return a function that runs `ludus env play ARGUMENTS` with lines on standard input."""

    def run(lines: list[str], *arguments: str, stdin: type[io.StringIO] = io.StringIO) -> Outcome:
        monkeypatch.setattr(sys, "stdin", stdin("".join(f"{line}\n" for line in lines)))
        return ludus("env", "play", *arguments)

    return run


def test_interactive_episode_runs_to_the_end_and_prints_the_score(play: PlayFunction) -> None:
    result = play([*GOAL_ACTIONS, "n"], *FROZEN_LAKE)
    assert result.code == 0, result.err
    assert "[S]FFF" in result.out
    assert "legal: LEFT, DOWN, RIGHT, UP" in result.out
    assert "reward 1, score 1" in result.out
    assert "-- terminated after 6 steps, return 1, success" in result.out
    assert "1 episode, return 1, mean 1.000" in result.out


def test_text_numbers_and_json_are_accepted(play: PlayFunction) -> None:
    lines = ["2", "sideways", '{"action": 2}', '{"action": 9}', "", ":state", ":help"]
    result = play(lines, *FROZEN_LAKE)
    assert result.code == 0, result.err
    assert "refused: expected one of LEFT, DOWN, RIGHT, UP; got 'sideways'" in result.out
    assert "less than or equal to 3, got 9" in result.out
    assert '"step_count": 2' in result.out
    assert ":quit quits" in result.out


def test_the_json_that_the_prompt_asks_for_is_an_answer(
    play: PlayFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shops.py").write_text(SHOP_ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = ['{"item": 1, "price": [2.5]}', '{"action": {"item": 0, "price": [1]}}', "{}"]
    result = play(lines, "gymnasium:shops:Shop-v0")
    assert result.code == 0, result.err
    assert "Observation: 1" in result.out
    assert result.out.count("reward 1, score") == 2
    assert result.out.count("refused: ") == 1


@pytest.mark.parametrize("stdin", [io.StringIO, _InterruptedInput])
def test_end_of_input_and_interrupt_quit_without_a_traceback(
    play: PlayFunction, stdin: type[io.StringIO]
) -> None:
    result = play(["RIGHT"], *FROZEN_LAKE, stdin=stdin)
    assert result.code == 0
    assert "Traceback" not in result.err
    result = play([*GOAL_ACTIONS, ""], *FROZEN_LAKE, stdin=stdin)
    assert "1 episode, " in result.out
    assert "-- episode 2, seed 4" in result.out


def test_bare_value_fills_the_required_field_without_a_renderer(
    play: PlayFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_renderer.py").write_text(
        "from openspiel_env.server.openspiel_environment import OpenSpielEnvironment\n"
        "class NoRendererEnvironment(OpenSpielEnvironment):\n"
        "    def __init__(self):\n"
        "        super().__init__(game='catch')\n"
        "        self.text_renderer = None\n"
    )
    monkeypatch.delitem(sys.modules, "no_renderer", raising=False)
    result = play(["1", "1", "7", ":quit"], "no_renderer:NoRendererEnvironment", "--seed", "1")
    assert result.code == 0, result.err
    assert "legal: 0, 1, 2" in result.out
    assert '"legal_actions"' in result.out
    assert "refused: " in result.out


TOOLS_MODULE = """
from ludus.env import Tool, ToolError
from openspiel_env.server.openspiel_environment import OpenSpielEnvironment


class ToolEnvironment(OpenSpielEnvironment):
    def __init__(self):
        super().__init__(game="catch")

    @property
    def tools(self):
        return [Tool("echo", "Repeat the text.", {"properties": {"text": {"type": "string"}}})]

    def call_tool(self, name, arguments):
        if name != "echo":
            return super().call_tool(name, arguments)
        if "text" not in arguments:
            raise ToolError("text is required")
        return {"reply": arguments["text"]}
"""


def test_tool_calls_do_not_end_the_interactive_episode(play: PlayFunction, tmp_path: Path) -> None:
    (tmp_path / "tool_environment.py").write_text(TOOLS_MODULE)
    lines = [
        *(":tools", ':call echo {"text": "hello"}', ":call echo", ":call", ":call shout {}"),
        *(':call echo ["hello"]', "STAY", ":quit"),
    ]
    result = play(lines, "tool_environment:ToolEnvironment", "--seed", "1")
    assert result.code == 0, result.err
    assert ":call NAME {...}" in result.out
    assert "tool echo: Repeat the text." in result.out
    assert '"reply": "hello"' in result.out
    assert "refused: text is required" in result.out
    assert "refused: this environment has no tool 'shout'; its tools are: echo" in result.out
    assert "refused: :call NAME needs a JSON object, got '[\"hello\"]'" in result.out
    assert "reward 0, score 0" in result.out, "a tool call ended the episode"
    frozen_lake_result = play([":tools", ":quit"], *FROZEN_LAKE)
    assert "this environment has no tools" in frozen_lake_result.out


def test_tool_that_pays_ends_the_interactive_episode(
    play: PlayFunction, ludus: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    recording_path = tmp_path / "paid.jsonl"
    lines = [":call look", ":call tip", ':call submit {"word": "moon"}', "n"]
    target = "tests.env.paying_env:PayingEnv"
    result = play(lines, target, "--seed", "1", "--record", str(recording_path))
    assert result.code == 0, result.err
    assert "reward 0.5, score 0.5" in result.out
    assert "-- terminated after 0 steps, return 1.5, success" in result.out
    (episode,) = read_recording(recording_path)
    assert (episode.episode_return, len(episode.steps)) == (1.5, 3)
    result = ludus("env", "replay", str(recording_path))
    assert result.code == 0, result.out


def test_replay_accepts_a_recorded_episode_and_detects_changes(
    play: PlayFunction, ludus: RunCli, tmp_path: Path
) -> None:
    recording_path = tmp_path / "games.jsonl"
    record_option = ("--record", str(recording_path))
    play([*GOAL_ACTIONS, "y", "LEFT", ":new", "y", "UP"], *FROZEN_LAKE, *record_option)
    episodes = list(read_recording(recording_path))
    assert [(e.seed, e.end_reason) for e in episodes] == [
        (3, "terminated"),
        (4, "the player quit"),
        (5, "the player quit"),
    ]

    result = ludus("env", "replay", str(recording_path))
    assert result.code == 0, result.out
    assert "3 of 3 episodes are the same" in result.out
    assert len(ludus("env", "replay", str(recording_path), "--limit", "1").out.splitlines()) < len(
        result.out.splitlines()
    )

    other_target = ("gymnasium:FrozenLake-v1", "--option", "map_name=8x8")
    result = ludus("env", "replay", str(recording_path), *other_target)
    assert result.code == 1
    assert "0 of 3 episodes are the same" in result.out
    assert "first difference: episode 1, reset: expected observation" in result.out

    server = LocalServer("gymnasium:FrozenLake-v1", {"is_slippery": False})
    try:
        addresses = server.start()
        for address in (addresses.http, addresses.grpc):
            result = ludus("env", "replay", str(recording_path), "--address", address)
            assert result.code == 0, result.out
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.jsonl",), "no recording 'missing.jsonl'"),
        (("x", "openspiel_env", "--address", "grpc://127.0.0.1:1"), "cannot be combined"),
        (("x", "--option", "game=catch"), "name the target"),
    ],
)
def test_invalid_replay_arguments_are_refused(
    ludus: RunCli, arguments: tuple[str, ...], message: str
) -> None:
    result = ludus("env", "replay", *arguments)
    assert result.code == 2
    assert message in result.err


def test_play_connects_to_a_running_server(play: PlayFunction) -> None:
    server = LocalServer("openspiel_env", {"game": "blackjack"})
    try:
        result = play(["STAND", "n"], server.start().http, "--seed", "1")
    finally:
        server.stop()
    assert result.code == 0, result.err
    assert "-- terminated after 1 step," in result.out
