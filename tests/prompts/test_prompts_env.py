"""Tests of the environment for data sets: rows by seed, episodes and invalid options."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ludus.env import TaskSet
from ludus.env.check import check_environment
from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.env.targets.targets import TargetFactory
from ludus.proto.errors import ConfigError, EpisodeStateError, ErrorCode
from ludus.proto.seeds import FIRST_EVAL_SEED
from prompts_env import PromptsAction, PromptsEnv, make_environment, write_rows
from prompts_env.data.permutation import Permutation
from tests.gateway.gateways import NAME, run_gateway

NUM_ROWS = 64


@pytest.fixture
def path(tmp_path: Path) -> str:
    columns = {
        "prompt": [f"question {index}" for index in range(NUM_ROWS)],
        "solution": [str(index) for index in range(NUM_ROWS)],
    }
    return str(write_rows(columns, tmp_path / "questions.jsonl"))


def list_rows(environment: Any, seeds: range) -> list[int]:
    """Reset the environment with each seed; return the row numbers."""
    rows = []
    for seed in seeds:
        environment.reset(seed=seed)
        rows.append(environment.state.row)
    return rows


# -- the contract ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"answer": "solution", "max_turns": 3}, {"test_size": 0.25, "template": "{prompt}!"}],
    ids=["plain", "with answers", "with a test split"],
)
def test_environment_satisfies_the_contract(path: str, options: dict[str, Any]) -> None:
    factory = functools.partial(make_environment, path=path, **options)
    check_environment(factory, seeds=range(4)).raise_if_failed()


# -- seeds and rows --------------------------------------------------------------------


def test_every_epoch_shows_every_row_once_in_a_different_order(
    path: str,
) -> None:
    environment = make_environment(path=path)
    first_epoch = list_rows(environment, range(NUM_ROWS))
    second_epoch = list_rows(environment, range(NUM_ROWS, 2 * NUM_ROWS))
    assert sorted(first_epoch) == sorted(second_epoch) == list(range(NUM_ROWS))
    assert first_epoch != second_epoch and first_epoch != sorted(first_epoch)
    assert list_rows(make_environment(path=path), range(NUM_ROWS)) == first_epoch
    assert list_rows(make_environment(path=path, seed=1), range(NUM_ROWS)) != first_epoch


@pytest.mark.parametrize(("test_size", "num_test"), [(0.25, 16), (10, 10), (0.001, 1)])
def test_splits_partition_the_rows(path: str, test_size: float, num_test: int) -> None:
    environment = make_environment(path=path, test_size=test_size)
    num_train = NUM_ROWS - num_test
    assert environment.tasks == TaskSet(num_train, num_test, ("prompt", "solution"))
    train_rows = set(list_rows(environment, range(5 * num_train)))
    assert environment.state.split == "train"
    test_rows = set(list_rows(environment, range(FIRST_EVAL_SEED, FIRST_EVAL_SEED + 5 * num_test)))
    assert environment.state.split == "test"
    assert (len(train_rows), len(test_rows)) == (num_train, num_test)
    assert train_rows.isdisjoint(test_rows)


def test_larger_test_split_contains_the_rows_of_a_smaller_split(path: str) -> None:
    def list_test_rows(num_rows: int) -> set[int]:
        environment = make_environment(path=path, test_size=num_rows)
        return set(list_rows(environment, range(FIRST_EVAL_SEED, FIRST_EVAL_SEED + num_rows)))

    assert list_test_rows(8) < list_test_rows(20)


def test_evaluation_without_test_rows_uses_training_rows(path: str) -> None:
    environment = make_environment(path=path)
    seeds = range(FIRST_EVAL_SEED, FIRST_EVAL_SEED + NUM_ROWS)
    assert sorted(list_rows(environment, seeds)) == list(range(NUM_ROWS))


def test_separate_test_file_keeps_all_rows_for_training(path: str, tmp_path: Path) -> None:
    test_path = write_rows([{"prompt": "test row"}], tmp_path / "test.jsonl")
    environment = make_environment(path=path, test_path=str(test_path))
    assert environment.tasks.num_tasks == NUM_ROWS and environment.tasks.num_test_tasks == 1
    observation = environment.reset(seed=FIRST_EVAL_SEED + 7).observation
    assert observation.messages[0].content == "test row"


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 1000])
def test_permutation_contains_each_number_once(size: int) -> None:
    order = [Permutation(size, "key")[index] for index in range(size)]
    assert sorted(order) == list(range(size))


@pytest.mark.slow
def test_elements_of_permutations_are_equally_likely() -> None:
    counts = Counter(Permutation(5, f"key {index}")[2] for index in range(2000))
    assert all(330 < counts[value] < 470 for value in range(5)), f"frequencies are uneven: {counts}"


# -- an episode ------------------------------------------------------------------------


def test_response_ends_the_episode(path: str) -> None:
    environment = make_environment(path=path)
    first_result = environment.reset(seed=3)
    row = {
        "prompt": first_result.observation.messages[0].content,
        "solution": str(environment.state.row),
    }
    result = environment.step(PromptsAction(text="anything"))
    assert first_result.info == result.info == row
    assert (result.reward, result.terminated, result.success) == (0.0, True, None)
    with pytest.raises(EpisodeStateError) as exc_info:
        environment.step(PromptsAction(text="again"))
    assert exc_info.value.code == ErrorCode.EPISODE_OVER


@pytest.mark.parametrize(("response", "reward"), [("{}", 1.0), (" {}\n", 1.0), ("{} or so", 0.0)])
def test_correct_response_earns_reward_one(path: str, response: str, reward: float) -> None:
    environment = make_environment(path=path, answer="solution")
    environment.reset(seed=3)
    text = response.format(environment.state.row)
    result = environment.step(PromptsAction(text=text))
    assert (result.reward, result.success) == (reward, reward == 1.0)


def test_wrong_response_can_be_retried(path: str) -> None:
    environment = make_environment(
        path=path, answer="solution", max_turns=3, retry_prompt="Try again."
    )
    environment.reset(seed=0)
    wrong_result = environment.step(PromptsAction(text="wrong"))
    assert (wrong_result.reward, wrong_result.terminated) == (0.0, False)
    assert wrong_result.observation.messages[0].content == "Try again."
    right_result = environment.step(PromptsAction(text=str(environment.state.row)))
    assert (right_result.reward, right_result.terminated, right_result.success) == (1.0, True, True)
    environment.reset(seed=0)
    terminations = [environment.step(PromptsAction(text="wrong")).terminated for _ in range(3)]
    assert terminations == [False, False, True]


def test_prompts_are_made_from_messages_and_templates(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Hi"}], "question": "2 + 2", "unit": "m"}]
    path = str(write_rows(rows, tmp_path / "rows.jsonl"))

    def render_prompt(**options: str) -> list[dict[str, str]]:
        environment = make_environment(path=path, **options)
        observation = environment.reset(seed=0).observation
        return environment.text_renderer.render(observation, first=True)

    assert render_prompt() == [{"role": "user", "content": "Hi"}]
    assert render_prompt(system_prompt="Be brief.", template="{question} in {unit}, {{sic}}") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2 in m, {sic}"},
    ]


def test_example_responses_come_from_options_or_columns(path: str) -> None:
    def list_examples(**options: Any) -> list[str]:
        environment = make_environment(path=path, **options)
        observation = environment.reset(seed=3).observation
        return environment.text_renderer.legal_answers(observation)

    assert list_examples() == []
    assert list_examples(example_answers=["yes", "no"]) == ["yes", "no"]
    assert list_examples(answer="solution")[:3] == ["0", "1", "2"]
    environment = make_environment(path=path)
    environment.reset(seed=3)
    assert list_examples(example_answers="solution") == [str(environment.state.row)]


# -- invalid options -----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "x"}, "column 'x', but the first row has prompt, solution; set prompt to one"),
        ({"prompt": "promt"}, r"prompt names the column 'promt', .*; did you mean 'prompt'\?"),
        ({"template": "{promt}"}, r"template names the column 'promt'.*did you mean 'prompt'\?"),
        ({"template": "none"}, "needs column names in braces"),
        ({"template": "{prompt.x}"}, "got 'prompt.x'"),
        ({"template": "{prompt"}, "write a literal brace twice"),
        ({"answer": "solutoin"}, "'solutoin', but the data set has prompt, solution; did you mean"),
        ({"max_turns": 2}, "set answer to the column"),
        ({"test_size": 64}, "none remains for training"),
        ({"test_size": -0.1}, "test_size: expected at least 0, got -0.1"),
        ({"test_size": 1.5}, "must be a share below 1"),
        ({"test_size": 0.5, "test_path": "x.jsonl"}, "remove one of them"),
        (
            {"path": "nowhere.jsonl"},
            "does not exist in the working folder '.*'; correct the path, or",
        ),
        ({"path": "/nowhere.jsonl"}, "path = '/nowhere.jsonl' does not exist; correct the path$"),
    ],
)
def test_invalid_options_are_refused(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(**{"path": path, **options})


def test_misspelt_file_has_a_hint(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not exist; did you mean '{Path(path).name}'"):
        make_environment(path=str(Path(path).with_stem(Path(path).stem + "s")))


def test_file_with_other_separators_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt;answer\na;b\n")
    with pytest.raises(ConfigError, match=r"the first row has prompt;answer; .* commas"):
        make_environment(path=str(tmp_path / "rows.csv"))


def test_row_without_the_prompt_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    with pytest.raises(ConfigError, match=r"row 2: .* got no 'prompt' .*; fix or remove the row"):
        make_environment(path=str(tmp_path / "rows.jsonl"))


def test_environment_variable_sets_the_options(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    application = importlib.import_module("prompts_env.server.app")
    monkeypatch.setenv("PROMPTS_OPTIONS", "{}")
    with pytest.raises(ConfigError, match="path is required"):
        _ = application.app
    monkeypatch.setenv("PROMPTS_OPTIONS", json.dumps({"path": path, "promt": "x"}))
    with pytest.raises(ConfigError, match="did you mean 'prompt'"):
        _ = application.app
    monkeypatch.setenv("PROMPTS_OPTIONS", json.dumps({"path": path}))
    assert application.app.routes


# -- connections -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_every_protocol_provides_the_tasks_and_the_row(path: str) -> None:
    factory = functools.partial(make_environment, path=path, test_size=4)
    async with EnvServer(factory, ServerOptions(port=0)) as server:
        for address in (
            server.grpc_address,
            server.http_address,
            server.http_address.replace("http", "ws"),
        ):
            async with await AsyncEnvClient.connect(address) as client:
                description = await client.describe()
                assert description.tasks == TaskSet(60, 4, ("prompt", "solution"))
                session, first_result = await client.open(seed=5)
                result = await session.step(text="anything")
                assert result.info == first_result.info and set(result.info) == {
                    "prompt",
                    "solution",
                }
        assert (
            await asyncio.to_thread(read_prompt, server.http_address) == first_result.info["prompt"]
        )


def read_prompt(address: str) -> str:
    """Play seed 5 over HTTP; return its prompt."""
    with PromptsEnv(base_url=address) as client:
        messages = client.reset(seed=5).observation.messages
        assert client.step(PromptsAction(text="x")).done
        return messages[0].content


def test_pattern_extracts_the_graded_text(path: str) -> None:
    pattern = "<final>(.*?)</final>"
    environment = make_environment(path=path, answer="solution", answer_pattern=pattern)
    solution = environment.reset(seed=0).info["solution"]
    for text, reward in (
        (f"<final>x</final> or rather <final> {solution}\n</final>", 1.0),
        (f"<final>{solution}</final> or <final>x</final>", 0.0),
        (solution, 0.0),
    ):
        environment.reset(seed=0)
        result = environment.step(PromptsAction(text=text))
        assert (result.reward, result.success) == (reward, reward == 1.0)


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [("(", "solution"), ("a", "solution"), ("(a)(b)", "solution"), ("(a)", None)],
)
def test_invalid_pattern_is_refused(path: str, pattern: str, answer: str | None) -> None:
    with pytest.raises(ConfigError, match="answer_pattern"):
        make_environment(path=path, answer=answer, answer_pattern=pattern)


async def test_gateway_reports_the_tasks(path: str) -> None:
    factory = functools.partial(make_environment, path=path, test_size=4)
    async with run_gateway(factory=factory) as (gateway, _):
        for address in (gateway.grpc_address, f"{gateway.http_address}/envs/{NAME}"):
            async with await AsyncEnvClient.connect(address) as client:
                assert (await client.describe()).tasks == TaskSet(60, 4, ("prompt", "solution"))


@pytest.mark.slow
async def test_workers_show_the_same_rows(path: str) -> None:
    factory = TargetFactory("prompts_env", {"path": path})
    options = ServerOptions(port=0, isolation="pool", num_workers=2)
    seeds = range(2 * NUM_ROWS)
    async with (
        EnvServer(factory, options) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        description = await client.describe()
        rows = []
        for seed in seeds:
            session, _ = await client.open(seed=seed)
            rows.append((await session.state())["row"])
            await session.close()
    assert description.tasks == TaskSet(NUM_ROWS, 0, ("prompt", "solution"))
    assert rows == list_rows(make_environment(path=path), seeds)
