"""The arithmetic environment."""

from __future__ import annotations

import asyncio
import functools
import importlib
import operator
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.env.catalogue.packages import list_installed_packages
from ludus.env.check import check_environment
from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import play_policy, summarize
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.errors import ActionParseError, ConfigError, EpisodeStateError, ErrorCode
from math_env import MathAction, MathEnv, MathObservation, make_environment
from math_env.policies import fixed_policies

ROOT = Path(__file__).parents[2]
NUM_QUESTIONS = 400
OPERATORS = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
}


def reset_environment(seed: int, **options: object) -> MathObservation:
    return make_environment(**options).reset(seed=seed).observation


# -- environment contract --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATORS)
def test_environment_contract(operation: str) -> None:
    factory = functools.partial(make_environment, operation=operation, limit=7)
    check_environment(factory, seeds=range(4)).raise_if_failed()


@pytest.mark.slow
def test_package_is_listed_as_installed() -> None:
    assert "math_env" in [package.name for package in list_installed_packages()]


# -- questions -------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATORS)
def test_only_the_solution_is_rewarded(operation: str) -> None:
    environment = make_environment(operation=operation, limit=9)
    for seed in range(NUM_QUESTIONS):
        question = environment.reset(seed=seed).observation
        solution = OPERATORS[operation](question.left, question.right)
        assert solution in question.legal_actions
        answer = solution + seed % 3
        transition = environment.step(MathAction(answer=answer))
        assert (transition.reward, transition.terminated) == (float(answer == solution), True)
        assert transition.success is (answer == solution)
        assert transition.observation.legal_actions == []


def test_seed_determines_the_question() -> None:
    question = reset_environment(5)
    random.seed(1)
    assert reset_environment(5) == question
    assert (
        len({(reset_environment(seed).left, reset_environment(seed).right) for seed in range(50)})
        > 40
    )


def test_numbers_are_below_the_limit() -> None:
    questions = [reset_environment(seed, limit=4) for seed in range(NUM_QUESTIONS)]
    assert {question.left for question in questions} == {0, 1, 2, 3}
    assert {question.right for question in questions} == {0, 1, 2, 3}


def test_subtraction_has_no_negative_solution() -> None:
    questions = [
        reset_environment(seed, operation="subtract", limit=6) for seed in range(NUM_QUESTIONS)
    ]
    assert all(question.left >= question.right for question in questions)


def test_episode_accepts_one_step() -> None:
    environment = make_environment()
    with pytest.raises(EpisodeStateError) as error_info:
        environment.step(MathAction(answer=1))
    assert error_info.value.code == ErrorCode.NOT_RESET
    environment.reset(seed=0)
    environment.step(MathAction(answer=1))
    with pytest.raises(EpisodeStateError) as error_info:
        environment.step(MathAction(answer=1))
    assert error_info.value.code == ErrorCode.EPISODE_OVER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operation": "divide"}, "'add', 'subtract' or 'multiply', got 'divide'"),
        ({"limit": 1}, "at least 2, got 1"),
        ({"limit": "many"}, "limit: expected a valid integer, got 'many'"),
        ({"operation": "multiply", "limit": 1000}, "998,002 with 'multiply'; reduce the limit"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(**options)


def test_random_generator_with_the_same_seed_cannot_predict_the_question() -> None:
    environment, num_predicted = make_environment(), 0
    for seed in range(400):
        question = environment.reset(seed=seed).observation
        rng = random.Random(seed)
        prediction = rng.randrange(20), rng.randrange(20)
        num_predicted += (question.left, question.right) == prediction
    assert num_predicted < 8, f"{num_predicted} of 400 predictions were right, expected about 1"


# -- text ------------------------------------------------------------------------------


def test_prompt_contains_the_question() -> None:
    environment = make_environment(operation="multiply", limit=13)
    question = environment.reset(seed=3).observation
    (message,) = environment.text_renderer.render(question, first=True)
    assert message == {"role": "user", "content": f"{question.left} x {question.right} = ?"}


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
def test_last_whole_number_is_parsed_as_the_action(text: str, answer: int) -> None:
    environment = make_environment()
    question = environment.reset(seed=0).observation
    assert environment.text_renderer.parse(text, question).answer == answer


@pytest.mark.parametrize("text", ["", "nineteen", "1.5", "1,900", "9" * 5000])
def test_text_without_a_whole_number_is_invalid(text: str) -> None:
    environment = make_environment()
    question = environment.reset(seed=0).observation
    with pytest.raises(ActionParseError, match="expected a whole number"):
        environment.text_renderer.parse(text, question)


# -- policies and connections ----------------------------------------------------------------


@pytest.mark.slow
async def test_baselines_have_the_expected_win_rates() -> None:
    factory = functools.partial(make_environment, limit=3)
    async with (
        EnvServer(factory, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        results = {
            name: summarize(await play_policy(client, policy, range(NUM_QUESTIONS)))
            for name, policy in fixed_policies({"limit": 3}).items()
        }
    assert results["optimal"].win_rate == 1.0
    low, high = results["random"].win_rate_ci95
    assert low < 1 / 5 < high


async def test_typed_client_plays_over_http() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as server:
        assert await asyncio.to_thread(play_right_answer, server.http_address) == 1.0


def play_right_answer(address: str) -> float | None:
    """Play an episode over HTTP with the right answer, and return the reward."""
    with MathEnv(base_url=address) as env:
        question = env.reset(seed=7).observation
        result = env.step(MathAction(answer=question.left + question.right))
        assert result.done and env.state().step_count == 1
        return result.reward


def test_environment_variables_set_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATH_OPERATION", "multiply")
    monkeypatch.setenv("MATH_LIMIT", "1000")
    application = importlib.import_module("math_env.server.app")
    with pytest.raises(ConfigError, match="reduce the limit"):
        _ = application.app
    monkeypatch.setenv("MATH_LIMIT", "5")
    assert application.app.routes


@pytest.mark.slow
def test_server_with_invalid_options_exits_with_one_line() -> None:
    command = [sys.executable, "-m", "math_env.server.app", "--port", "0", "--limit", "1"]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ}
    )
    assert process.returncode == 2
    assert process.stderr.splitlines() == ["error: limit: expected at least 2, got '1'"]
