"""Tests of `ludus eval --model`, with the trainer in this process instead of a child process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel

from ludus.env.evaluation import compute_mean_interval
from ludus.proto.config import TinyModel
from ludus.proto.evaluations import ModelEvaluation
from ludus.services.cli import train_command
from ludus.services.cli.trainer_process import TrainerEnd, TrainerOutput
from ludus.trainer.__main__ import main as run_trainer_main
from ludus.trainer.driver import evaluated_models
from ludus.trainer.models import load
from ludus.trainer.models.tiny import make_model, make_tokenizer, save
from tests.cli.commands import RunCli
from tests.cli.openai_server import MAX_PROMPT_CHARS, MODEL, TOKEN, OpenAiServer, serve_openai

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SUMS = [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(4) for b in range(4)]
FIRST_SEED = 2**31


def write_model(folder: Path, seed: int, max_tokens: int = 64) -> None:
    texts = [text for row in SUMS for text in row.values()] * 5
    tokenizer = make_tokenizer(texts, 300)
    config = TinyModel(width=32, num_heads=1, intermediate=32, num_layers=1, max_tokens=max_tokens)
    save(make_model(config, tokenizer, seed), tokenizer, folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny models `a`, `b` and `short`, and return their folder."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        write_model(folder / name, seed)
    write_model(folder / "short", 0, max_tokens=20)
    return folder


@pytest.fixture
def files(ludus: RunCli, tmp_path: Path, models: Path) -> Path:
    """Put the models and a data set into the empty working directory, and return it."""
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    rows = "".join(json.dumps(row) + "\n" for row in SUMS)
    (tmp_path / "sums.jsonl").write_text(rows)
    return tmp_path


@pytest.fixture(autouse=True)
def offer_test_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers import the environments of the tests, as if their package were installed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(autouse=True)
def use_trainer_in_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run the trainer in this process, which has already imported torch."""

    def run(
        arguments: Sequence[str],
        config: BaseModel | None = None,
        *,
        warn: Callable[[str], None],
        on_tick: Callable[[], None],
        on_stopping: Callable[[], None],
    ) -> TrainerEnd:
        folder = Path(arguments[arguments.index("--folder") + 1])
        assert config is not None
        (folder / "config.json").write_text(config.model_dump_json())
        code = run_trainer_main([*arguments, "--config", str(folder / "config.json")])
        on_tick()
        output = TrainerOutput()
        for line in capfd.readouterr().err.splitlines():
            output.add_line(line)
        for warning in output.warnings:
            warn(warning)
        return TrainerEnd(code, was_stopped=False, was_killed=False, output=output)

    monkeypatch.setattr(train_command, "run_trainer", run)


DATA = ("--env", "prompts_env", "--option", "path=sums.jsonl", "--option", "answer=answer")


def evaluate(ludus: RunCli, *arguments: str) -> tuple[ModelEvaluation, str]:
    """Run `ludus eval` with a JSON file, and return the result and the output."""
    outcome = ludus("eval", "--max-completion-tokens", "4", "--json", "out.json", *arguments)
    assert outcome.code == 0, outcome.err
    return ModelEvaluation.model_validate_json(Path("out.json").read_bytes()), outcome.out


def test_two_models_play_the_same_seeds(ludus: RunCli, files: Path) -> None:
    evaluation, out = evaluate(
        ludus, "--model", "a", "--model", "./b", *DATA, "--episodes", "6", "--report", "out.html"
    )
    episodes = {
        policy: [episode for episode in evaluation.episodes if episode.policy == policy]
        for policy in ("random", "a", "./b")
    }
    for policy_episodes in episodes.values():
        assert [episode.seed - FIRST_SEED for episode in policy_episodes] == list(range(6))
    for name in ("a", "./b"):
        assert all(turn.answer for episode in episodes[name] for turn in episode.turns)
        assert "=" in episodes[name][0].turns[0].shown[0].text
        returns = [episode.episode_return for episode in episodes[name]]
        result = evaluation.models[name].result
        assert result.expected_return_ci95 == compute_mean_interval(returns)
        assert name in out
    differences = [
        first.episode_return - second.episode_return
        for first, second in zip(episodes["a"], episodes["./b"], strict=True)
    ]
    (difference,) = evaluation.differences
    assert (difference.first, difference.second, difference.num_tasks) == ("a", "./b", 6)
    assert difference.return_difference_ci95 == compute_mean_interval(differences)
    assert "random" in evaluation.baselines and evaluation.is_finished
    check_report(files / "out.html", episodes["a"][0].turns[0].shown[0].text)


def check_report(path: Path, prompt: str) -> None:
    """Check that the page is well-formed, uses no external resource, and shows a prompt."""
    page = path.read_text(encoding="utf-8")
    root = ET.fromstring(page.removeprefix("<!doctype html>\n"))
    assert not re.search(r"https?://|url\(|@import|src=|href=", page)
    texts = ["".join(element.itertext()) for element in root.iter("pre")]
    assert prompt in texts
    rows = [" ".join("".join(row.itertext()).split()) for row in root.iter("tr")]
    assert any(row.startswith("random") for row in rows)
    assert any(row.startswith("a − ./b") for row in rows)


def test_temperature_0_is_repeatable_and_plays_each_task_once(ludus: RunCli, files: Path) -> None:
    arguments = ("--model", "a", *DATA, "--option", "test_size=5", "--temperature", "0")
    first, out = evaluate(ludus, *arguments, "--episodes", "9")
    second, _ = evaluate(ludus, *arguments, "--episodes", "9", "--seed", "0")
    select = [episode for episode in first.episodes if episode.policy == "a"]
    assert select == [episode for episode in second.episodes if episode.policy == "a"]
    assert (first.num_episodes, first.num_episodes_requested) == (5, 9)
    assert "5 of 9 episodes were played, one for each task" in out


def test_invalid_answers_cost_what_they_cost_in_training(ludus: RunCli, files: Path) -> None:
    game = ("--env", "openspiel_env", "--option", "game=kuhn_poker", "--episodes", "4")
    result, _ = evaluate(ludus, "--model", "a", "--baseline", "random", *game)
    # Returns are from -2 to 2, so an invalid answer costs -2 - 2.
    episodes = [episode for episode in result.episodes if episode.policy == "a"]
    assert {(episode.status, episode.episode_return) for episode in episodes} == {
        ("invalid_action", -4.0)
    }


def test_prompts_beyond_the_context_are_counted_as_truncated(ludus: RunCli, files: Path) -> None:
    rows = [{"prompt": "1 + 1 = ?" * count, "answer": "2"} for count in (1, 9)]
    (files / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation, out = evaluate(ludus, "--model", "short", *DATA, "--episodes", "2")
    model = evaluation.models["short"]
    assert (model.result.num_games, model.result.num_void) == (2, 0)
    statuses = {episode.status for episode in evaluation.episodes if episode.policy == "short"}
    assert statuses == {"terminated", "truncated"}
    assert "short: 1 of 2 episodes were truncated: the first prompt leaves no room" in out
    assert "the model's context of 20 tokens" in " ".join(out.split())


def test_tools_are_called(ludus: RunCli, files: Path) -> None:
    target = "tests.rollout.calculator_env:CalculatorEnv"
    evaluation, _ = evaluate(ludus, "--model", "a", "--env", target, "--tools", "--episodes", "2")
    assert evaluation.models["a"].result.num_games == 2


def test_a_fine_tuning_run_stands_for_its_kept_model(files: Path) -> None:
    run_folder = files / "runs" / "chats"
    shutil.copytree(files / "a", run_folder / "checkpoints" / "step-00000002" / "model")
    shutil.copytree(files / "b", run_folder / "model")
    (run_folder / "metrics.jsonl").touch()
    path = evaluated_models.find_model_path("runs/chats")
    assert path == str((run_folder / "model").resolve())


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    """Start an OpenAI-compatible server."""
    with serve_openai() as server:
        yield server


def test_endpoint_plays_the_episodes(
    ludus: RunCli, files: Path, server: OpenAiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.wants_token, server.num_failures = True, 1
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    long_row = {"prompt": f"1 + 1 = ? {'.' * MAX_PROMPT_CHARS}", "answer": "2"}
    (files / "sums.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*SUMS[:3], long_row])
    )
    endpoint = ("--endpoint", server.url, "--token-env", "MY_TOKEN", "--temperature", "0.5")
    evaluation, out = evaluate(ludus, "--model", MODEL, *DATA, *endpoint, "--episodes", "4")
    assert (evaluation.endpoint, evaluation.generator) == (server.url, None)
    model = evaluation.models[MODEL]
    assert (model.result.num_games, model.result.win_rate) == (4, 0.75)
    assert list(model.truncations.values()) == [1]
    assert "is longer than the context of the endpoint's model" in " ".join(out.split())
    request = server.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == (MODEL, 0.5, 4)
    assert "tools" not in request
    assert TOKEN not in (files / "out.json").read_text() + out


def test_endpoint_calls_tools(ludus: RunCli, files: Path, server: OpenAiServer) -> None:
    server.calls_tools = True
    arguments = ("--env", "tests.rollout.calculator_env:CalculatorEnv", "--tools")
    evaluation, _ = evaluate(
        ludus, "--model", MODEL, *arguments, "--endpoint", server.url, "--episodes", "1"
    )
    (episode,) = (episode for episode in evaluation.episodes if episode.policy == MODEL)
    assert episode.turns[0].action == [{"tool": "add", "arguments": {"a": 1, "b": 2}}]
    assert (episode.num_turns, episode.status) == (2, "terminated")
    _, assistant, result = server.requests[-1]["messages"]
    assert assistant["tool_calls"][0]["id"] == result["tool_call_id"] == "call-1"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--model", "./none"), ["--model './none' does not exist"]),
        (("--model", "none/none"), ["--model 'none/none': there is no such folder"]),
        (("--model", "empty"), ["--model 'empty' is no model, because it has no config.json"]),
        (("--model", "no_weights"), ["--model 'no_weights': it has a config.json and no weights"]),
        (("--model", "no_template"), ["--model 'no_template'", "has no chat template"]),
        (("--model", "m.gguf"), ["--model 'm.gguf' is a GGUF file", "--endpoint"]),
        (("--model", "a", "--env", "none_env"), ["none_env"]),
        (("--model", "a", "--option", "pth=1"), ["pth", "path"]),
        (("--model", "a", "--episodes", "0"), ["--episodes must be 1 or more, got 0"]),
        (("--model", "a", "--episodes", "-3"), ["--episodes must be 1 or more, got -3"]),
        (("--model", "a", "--temperature", "nan"), ["--temperature must be 0 or more, got nan"]),
        (("--model", "a", "--temperature", "inf"), ["--temperature must be 0, or a number from"]),
        (
            ("--model", "a", "--temperature", "3", "--generator", "vllm"),
            ["--temperature must be 0, or a number from 0.01 to 2, got 3"],
        ),
        (("--model", "a", "--max-completion-tokens", "64"), ["at most 64 tokens", "got 64"]),
        (("--model", "a", "--seed", "-1"), ["--seed must be a number from 0"]),
        (("--model", "a", "--model", "a"), ["--model a is given twice"]),
        (("--model", "a", "--generator", "tgi"), ["--generator must be one of", "'tgi'"]),
        (("--model", "a", "--generator", "vllm"), ["--generator vllm needs vLLM"]),
        (("--model", "a", "--report", "none/x.html"), ["--report 'none/x.html' needs the folder"]),
        (("--model", "a", "--baseline", "best"), ["--baseline must be one of random, got 'best'"]),
        (("--model", "a", "--endpoint", "localhost"), ["--endpoint must be the address"]),
        (("--model", "a", "--endpoint", "http://me:key@host"), ["must not contain a token"]),
        (("--model", "a", "--endpoint", "http://127.0.0.1:9"), ["does not respond"]),
        (("--model", "a", "--endpoint", "http://a b"), ["--endpoint", "a b"]),
        (
            ("--model", "a", "--endpoint", "SERVER", "--token-env", "BAD_TOKEN"),
            ["the token in the variable BAD_TOKEN must contain printable ASCII"],
        ),
        (("--model", "a", "--endpoint", "SERVER"), ["has no model 'a'; it has served"]),
        (
            ("--model", "a", "--endpoint", "LOCKED"),
            ["wants a token", "OPENAI_API_KEY is not set", "--token-env"],
        ),
        (("a",), ["'a' is a model, not a run", "ludus eval --model a --env TARGET"]),
        (("--model", "a", "runs/demo"), ["--model cannot be combined with the run"]),
        (("--seed", "1", "runs/demo"), ["--seed cannot be combined with the run"]),
        (
            ("--max-completion-tokens", "8", "runs/demo"),
            ["--max-completion-tokens cannot be combined with the run"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_are_reported_in_one_line_before_a_model_is_loaded(
    ludus: RunCli,
    files: Path,
    server: OpenAiServer,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    messages: Sequence[str],
) -> None:
    monkeypatch.setattr(evaluated_models, "make_engine", None)
    monkeypatch.setattr(evaluated_models, "is_vllm_installed", lambda: False)
    monkeypatch.setattr(load, "is_hub_reachable", lambda minute: False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("BAD_TOKEN", "secret\nkéy")
    server.wants_token = "LOCKED" in arguments
    arguments = tuple(
        server.url if argument in ("SERVER", "LOCKED") else argument for argument in arguments
    )
    (files / "empty").mkdir()
    (files / "m.gguf").touch()
    for name, missing_file in (
        ("no_weights", "model.safetensors"),
        ("no_template", "chat_template.jinja"),
    ):
        shutil.copytree(files / "a", files / name, ignore=shutil.ignore_patterns(missing_file))
    data = () if arguments == ("a",) or "runs/demo" in arguments else DATA
    if "--env" in arguments:
        data = ()
    outcome = ludus("eval", *data, *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and all(message in errors[0] for message in messages), outcome.err
    assert "Traceback" not in outcome.err


def test_environment_without_text_is_refused(ludus: RunCli, files: Path) -> None:
    (files / "pictures.py").write_text(
        "import gymnasium, numpy\n"
        "class Pictures(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), numpy.uint8)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return self.observation_space.sample(), {}\n"
        "    def step(self, action):\n"
        "        return self.observation_space.sample(), 0.0, True, False, {}\n"
        "gymnasium.register('Pictures-v0', Pictures)\n"
    )
    outcome = ludus("eval", "--model", "a", "--env", "gymnasium:pictures:Pictures-v0")
    assert outcome.code == 2
    assert "shows no text to language models" in outcome.err and "Pictures-v0" in outcome.err


def test_stopped_evaluation_shows_the_result_so_far(files: Path) -> None:
    """The trainer is a child process here, as for users."""
    program = (
        "import sys\n"
        "from ludus.services.cli import app, eval_models\n"
        "eval_models.PLAIN_INTERVAL_S = 0.0\n"
        f"sys.argv = {['ludus', 'eval', '--model', 'a', *DATA, '--episodes', '3000']!r}\n"
        "sys.argv += ['--baseline', 'random', '--json', 'out.json']\n"
        "app.main()\n"
    )
    cli = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=files,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert cli.stderr is not None
        lines = []
        for line in cli.stderr:
            lines.append(line)
            if line.startswith("a  "):
                break
        cli.send_signal(signal.SIGINT)
        out, err = cli.communicate(timeout=120)
    finally:
        cli.kill()
    assert cli.returncode == 130, "".join(lines) + err
    evaluation = ModelEvaluation.model_validate_json((files / "out.json").read_bytes())
    result = evaluation.models["a"].result
    assert 0 < result.num_games < evaluation.num_episodes
    assert not evaluation.is_finished
    assert f"a: stopped after {result.num_games:,} of 3,000 episodes" in out
    assert f"the result above is that of the {result.num_games:,} episodes" in err


def test_tools_without_text_are_offered_by_option(ludus: RunCli, files: Path) -> None:
    (files / "silent.py").write_text(
        "from tests.rollout.calculator_env import CalculatorEnv\n"
        "class SilentEnv(CalculatorEnv):\n"
        "    text_renderer = None\n"
    )
    outcome = ludus("eval", "--model", "a", "--env", "silent:SilentEnv")
    assert outcome.code == 2
    assert "'calculator' shows no text, but offers the tools add" in outcome.err
    assert "--tools" in outcome.err
