from __future__ import annotations

import asyncio
import functools
import importlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.env.check import check_environment
from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import play_policy, summarize
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.env.targets.targets import installed_packages
from ludus.proto.errors import ActionParseError, ConfigError, EpisodeStateError, ErrorCode
from math_env import MathAction, MathEnv, MathObservation, make_environment
from math_env.policies import fixed_policies

ROOT = Path(__file__).parents[2]
NUM_QUESTIONS = 400
SOLVED = {
    "add": lambda left, right: left + right,
    "subtract": lambda left, right: left - right,
    "multiply": lambda left, right: left * right,
}


def first_of(seed: int, **options: object) -> MathObservation:
    return make_environment(**options).reset(seed=seed).observation


# -- the contract ----------------------------------------------------------------------


@pytest.mark.parametrize("operation", SOLVED)
def test_every_rule_of_the_environment_contract_holds(operation: str) -> None:
    factory = functools.partial(make_environment, operation=operation, limit=7)
    check_environment(factory, seeds=range(4)).raise_if_failed()


@pytest.mark.slow
def test_it_is_listed_among_the_installed_packages() -> None:
    assert "math_env" in [package.name for package in installed_packages()]


# -- questions -------------------------------------------------------------------------


@pytest.mark.parametrize("operation", SOLVED)
def test_the_solution_alone_is_rewarded_and_every_solution_is_a_legal_answer(operation) -> None:
    environment = make_environment(operation=operation, limit=9)
    for seed in range(NUM_QUESTIONS):
        asked = environment.reset(seed=seed).observation
        solution = SOLVED[operation](asked.left, asked.right)
        assert solution in asked.legal_actions
        answer = solution + seed % 3
        ended = environment.step(MathAction(answer=answer))
        assert (ended.reward, ended.terminated) == (float(answer == solution), True)
        assert ended.success is (answer == solution)
        assert ended.observation.legal_actions == []


def test_one_seed_asks_one_question_whatever_the_process_draws() -> None:
    asked = first_of(5)
    random.seed(1)
    assert first_of(5) == asked
    assert len({(first_of(seed).left, first_of(seed).right) for seed in range(50)}) > 40


def test_questions_reach_the_limit_and_stay_below_it() -> None:
    asked = [first_of(seed, limit=4) for seed in range(NUM_QUESTIONS)]
    assert {question.left for question in asked} == {0, 1, 2, 3}
    assert {question.right for question in asked} == {0, 1, 2, 3}


def test_a_subtraction_has_no_solution_below_zero() -> None:
    asked = [first_of(seed, operation="subtract", limit=6) for seed in range(NUM_QUESTIONS)]
    assert all(question.left >= question.right for question in asked)


def test_a_question_is_answered_once() -> None:
    environment = make_environment()
    with pytest.raises(EpisodeStateError) as refused:
        environment.step(MathAction(answer=1))
    assert refused.value.code == ErrorCode.NOT_RESET
    environment.reset(seed=0)
    environment.step(MathAction(answer=1))
    with pytest.raises(EpisodeStateError) as refused:
        environment.step(MathAction(answer=1))
    assert refused.value.code == ErrorCode.EPISODE_OVER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operation": "divide"}, "add, subtract, multiply, got 'divide'"),
        ({"limit": 1}, "at least 2, got 1"),
        ({"limit": "many"}, "at least 2, got 'many'"),
        ({"operation": "multiply", "limit": 1000}, "998,002; lower the limit"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(**options)


def test_who_draws_from_the_same_number_does_not_know_the_question() -> None:
    environment, num_known = make_environment(), 0
    for seed in range(400):
        asked = environment.reset(seed=seed).observation
        guessed = random.Random(seed)
        num_known += (asked.left, asked.right) == (guessed.randrange(20), guessed.randrange(20))
    assert num_known < 8, "one in 400 is guessed by chance"


# -- text ------------------------------------------------------------------------------


def test_the_question_is_shown_as_it_is_written() -> None:
    environment = make_environment(operation="multiply", limit=13)
    asked = environment.reset(seed=3).observation
    (message,) = environment.text_renderer.render(asked, first=True)
    assert message == {"role": "user", "content": f"{asked.left} x {asked.right} = ?"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("19", 19),
        (" 019.\n", 19),
        ("7 + 12 = 19", 19),
        ("<think>7 + 12, so 18 or 19</think> It is 19!", 19),
        ("-5", -5),
        ("7-12", 12),
    ],
)
def test_the_last_whole_number_is_the_answer(text: str, answer: int) -> None:
    environment = make_environment()
    asked = environment.reset(seed=0).observation
    assert environment.text_renderer.parse(text, asked).answer == answer


@pytest.mark.parametrize("text", ["", "nineteen", "1.5", "1,900", "9" * 5000])
def test_a_text_without_a_whole_number_is_no_action(text: str) -> None:
    environment = make_environment()
    asked = environment.reset(seed=0).observation
    with pytest.raises(ActionParseError, match="expected a whole number"):
        environment.text_renderer.parse(text, asked)


# -- policies and wires ----------------------------------------------------------------


@pytest.mark.slow
async def test_computing_is_always_right_and_guessing_once_in_as_many_answers() -> None:
    factory = functools.partial(make_environment, limit=3)
    async with (
        EnvServer(factory, ServerOptions(port=0)) as up,
        await AsyncEnvClient.connect(up.grpc_address) as client,
    ):
        played = {
            name: summarize(await play_policy(client, policy, range(NUM_QUESTIONS)))
            for name, policy in fixed_policies({"limit": 3}).items()
        }
    assert played["optimal"].win_rate == 1.0
    low, high = played["random"].win_rate_ci95
    assert low < 1 / 5 < high


async def test_the_typed_client_plays_over_http() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as up:
        assert await asyncio.to_thread(right_answer_over, up.http_address) == 1.0


def right_answer_over(address: str) -> float | None:
    with MathEnv(base_url=address) as env:
        asked = env.reset(seed=7).observation
        result = env.step(MathAction(answer=asked.left + asked.right))
        assert result.done and env.state().step_count == 1
        return result.reward


def test_variables_and_options_choose_what_the_application_asks(monkeypatch) -> None:
    monkeypatch.setenv("MATH_OPERATION", "multiply")
    monkeypatch.setenv("MATH_LIMIT", "1000")
    application = importlib.import_module("math_env.server.app")
    with pytest.raises(ConfigError, match="lower the limit"):
        _ = application.app
    monkeypatch.setenv("MATH_LIMIT", "5")
    assert application.app.routes


@pytest.mark.slow
def test_a_server_with_bad_options_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "math_env.server.app", "--port", "0", "--limit", "1"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ}
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: expected a limit of at least 2, got 1")
