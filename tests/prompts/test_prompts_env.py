"""Rows of a data set as tasks: which row a seed shows, what reaches rewards, what is refused."""

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
from tests.gateway.gateways import NAME, served

NUM_ROWS = 64


@pytest.fixture
def path(tmp_path: Path) -> str:
    columns = {
        "prompt": [f"question {number}" for number in range(NUM_ROWS)],
        "solution": [str(number) for number in range(NUM_ROWS)],
    }
    return str(write_rows(columns, tmp_path / "questions.jsonl"))


def rows_shown(environment: Any, seeds: range) -> list[int]:
    """The row that each seed shows."""
    rows = []
    for seed in seeds:
        environment.reset(seed=seed)
        rows.append(environment.state.row)
    return rows


# -- the contract ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"answer": "solution", "max_turns": 3}, {"test_size": 0.25, "template": "{prompt}!"}],
    ids=["plain", "with answers", "with a test split"],
)
def test_every_rule_of_the_environment_contract_holds(path: str, options: dict[str, Any]) -> None:
    factory = functools.partial(make_environment, path=path, **options)
    check_environment(factory, seeds=range(4)).raise_if_failed()


# -- seeds and rows --------------------------------------------------------------------


def test_as_many_seeds_as_rows_show_each_row_once_and_each_epoch_in_another_order(
    path: str,
) -> None:
    environment = make_environment(path=path)
    first = rows_shown(environment, range(NUM_ROWS))
    second = rows_shown(environment, range(NUM_ROWS, 2 * NUM_ROWS))
    assert sorted(first) == sorted(second) == list(range(NUM_ROWS))
    assert first != second and first != sorted(first)
    assert rows_shown(make_environment(path=path), range(NUM_ROWS)) == first
    assert rows_shown(make_environment(path=path, seed=1), range(NUM_ROWS)) != first


@pytest.mark.parametrize(("test_size", "num_test"), [(0.25, 16), (10, 10), (0.001, 1)])
def test_splits_share_no_row_and_hold_all(path: str, test_size: float, num_test: int) -> None:
    environment = make_environment(path=path, test_size=test_size)
    num_train = NUM_ROWS - num_test
    assert environment.tasks == TaskSet(num_train, num_test, ("prompt", "solution"))
    train = set(rows_shown(environment, range(5 * num_train)))
    assert environment.state.split == "train"
    test = set(rows_shown(environment, range(FIRST_EVAL_SEED, FIRST_EVAL_SEED + 5 * num_test)))
    assert environment.state.split == "test"
    assert (len(train), len(test)) == (num_train, num_test)
    assert train.isdisjoint(test)


def test_a_larger_test_keeps_the_rows_that_it_had(path: str) -> None:
    def test_rows(number: int) -> set[int]:
        environment = make_environment(path=path, test_size=number)
        return set(rows_shown(environment, range(FIRST_EVAL_SEED, FIRST_EVAL_SEED + number)))

    assert test_rows(8) < test_rows(20)


def test_without_a_test_evaluations_play_rows_of_training(path: str) -> None:
    environment = make_environment(path=path)
    seeds = range(FIRST_EVAL_SEED, FIRST_EVAL_SEED + NUM_ROWS)
    assert sorted(rows_shown(environment, seeds)) == list(range(NUM_ROWS))


def test_a_test_of_its_own_leaves_all_rows_to_training(path: str, tmp_path: Path) -> None:
    held_back = write_rows([{"prompt": "held back"}], tmp_path / "test.jsonl")
    environment = make_environment(path=path, test_path=str(held_back))
    assert environment.tasks.num_tasks == NUM_ROWS and environment.tasks.num_test_tasks == 1
    shown = environment.reset(seed=FIRST_EVAL_SEED + 7).observation
    assert shown.messages[0].content == "held back"


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 1000])
def test_a_permutation_holds_each_number_once(size: int) -> None:
    order = [Permutation(size, "key")[place] for place in range(size)]
    assert sorted(order) == list(range(size))


def test_places_of_permutations_are_equally_likely() -> None:
    counts = Counter(Permutation(5, f"key {number}")[2] for number in range(2000))
    assert all(330 < counts[value] < 470 for value in range(5)), "400 each, but for chance"


# -- an episode ------------------------------------------------------------------------


def test_one_answer_ends_the_episode_and_every_result_has_the_row(path: str) -> None:
    environment = make_environment(path=path)
    first = environment.reset(seed=3)
    row = {"prompt": first.observation.messages[0].content, "solution": str(environment.state.row)}
    ended = environment.step(PromptsAction(text="anything"))
    assert first.info == ended.info == row
    assert (ended.reward, ended.terminated, ended.success) == (0.0, True, None)
    with pytest.raises(EpisodeStateError) as refused:
        environment.step(PromptsAction(text="again"))
    assert refused.value.code == ErrorCode.EPISODE_OVER


@pytest.mark.parametrize(("said", "reward"), [("{}", 1.0), (" {}\n", 1.0), ("{} or so", 0.0)])
def test_an_answer_that_equals_the_column_is_worth_one(path: str, said: str, reward: float) -> None:
    environment = make_environment(path=path, answer="solution")
    environment.reset(seed=3)
    ended = environment.step(PromptsAction(text=said.format(environment.state.row)))
    assert (ended.reward, ended.success) == (reward, reward == 1.0)


def test_a_wrong_answer_may_be_given_again_as_often_as_allowed(path: str) -> None:
    environment = make_environment(
        path=path, answer="solution", max_turns=3, retry_prompt="Once more."
    )
    environment.reset(seed=0)
    again = environment.step(PromptsAction(text="wrong"))
    assert (again.reward, again.terminated) == (0.0, False)
    assert again.observation.messages[0].content == "Once more."
    right = environment.step(PromptsAction(text=str(environment.state.row)))
    assert (right.reward, right.terminated, right.success) == (1.0, True, True)
    environment.reset(seed=0)
    ends = [environment.step(PromptsAction(text="wrong")).terminated for _ in range(3)]
    assert ends == [False, False, True]


def test_prompts_may_be_conversations_and_templates_take_several_columns(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Hi"}], "question": "2 + 2", "unit": "m"}]
    path = str(write_rows(rows, tmp_path / "rows.jsonl"))

    def shown(**options: str) -> list[dict[str, str]]:
        environment = make_environment(path=path, **options)
        observation = environment.reset(seed=0).observation
        return environment.text_renderer.render(observation, first=True)

    assert shown() == [{"role": "user", "content": "Hi"}]
    assert shown(system_prompt="Be brief.", template="{question} in {unit}, {{sic}}") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2 in m, {sic}"},
    ]


def test_example_answers_come_from_a_list_a_column_or_the_answers_of_rows(path: str) -> None:
    def examples(**options: Any) -> list[str]:
        environment = make_environment(path=path, **options)
        observation = environment.reset(seed=3).observation
        return environment.text_renderer.legal_answers(observation)

    assert examples() == []
    assert examples(example_answers=["yes", "no"]) == ["yes", "no"]
    assert examples(answer="solution")[:3] == ["0", "1", "2"]
    environment = make_environment(path=path)
    environment.reset(seed=3)
    assert examples(example_answers="solution") == [str(environment.state.row)]


# -- options that do not fit -----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "question"}, "row 1: expected 'question' to be text .* got no 'question'"),
        ({"template": "{promt}"}, "row 1: expected 'promt' to be filled, got no 'promt'"),
        ({"template": "none"}, "expected names of columns in braces"),
        ({"template": "{prompt.x}"}, "got 'prompt.x'"),
        ({"template": "{prompt"}, "a brace that is meant is written twice"),
        ({"answer": "solutoin"}, "'solutoin', and the data set has prompt, solution; did you mean"),
        ({"max_turns": 2}, "set answer to the column"),
        ({"test_size": 64}, "leaves none to train on"),
        ({"test_size": -0.1}, "expected a share below 1"),
        ({"test_size": 1.5}, "expected a share below 1"),
        ({"test_size": 0.5, "test_path": "x.jsonl"}, "expected one of them"),
        ({"path": "nowhere.jsonl"}, "no data there"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    path: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(**{"path": path, **options})


def test_variables_name_the_data_of_the_application(path: str, monkeypatch) -> None:
    application = importlib.import_module("prompts_env.server.app")
    monkeypatch.setenv("PROMPTS_OPTIONS", "{}")
    with pytest.raises(ConfigError, match="with path"):
        _ = application.app
    monkeypatch.setenv("PROMPTS_OPTIONS", json.dumps({"path": path, "promt": "x"}))
    with pytest.raises(ConfigError, match="did you mean 'prompt'"):
        _ = application.app
    monkeypatch.setenv("PROMPTS_OPTIONS", json.dumps({"path": path}))
    assert application.app.routes


# -- wires -----------------------------------------------------------------------------


async def test_every_wire_says_how_many_tasks_there_are_and_carries_the_row(path: str) -> None:
    factory = functools.partial(make_environment, path=path, test_size=4)
    async with EnvServer(factory, ServerOptions(port=0)) as up:
        for address in (up.grpc_address, up.http_address, up.http_address.replace("http", "ws")):
            async with await AsyncEnvClient.connect(address) as client:
                described = await client.describe()
                assert described.tasks == TaskSet(60, 4, ("prompt", "solution"))
                session, first = await client.open(seed=5)
                ended = await session.step(text="anything")
                assert ended.info == first.info and set(ended.info) == {"prompt", "solution"}
        assert await asyncio.to_thread(shown_over, up.http_address) == first.info["prompt"]


def shown_over(address: str) -> str:
    with PromptsEnv(base_url=address) as env:
        shown = env.reset(seed=5).observation.messages
        assert env.step(PromptsAction(text="x")).done
        return shown[0].content


def test_a_pattern_finds_the_answer_in_what_is_said(path: str) -> None:
    pattern = "<final>(.*?)</final>"
    environment = make_environment(path=path, answer="solution", answer_pattern=pattern)
    environment.reset(seed=0)
    right = environment._row["solution"]
    for text, worth in (
        (f"<final>x</final> or rather <final> {right}\n</final>", 1.0),
        (f"<final>{right}</final> or <final>x</final>", 0.0),
        (right, 0.0),
    ):
        environment.reset(seed=0)
        result = environment.step(PromptsAction(text=text))
        assert (result.reward, result.success) == (worth, worth == 1.0)


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [("(", "solution"), ("a", "solution"), ("(a)(b)", "solution"), ("(a)", None)],
)
def test_a_pattern_that_finds_no_answer_is_refused(
    path: str, pattern: str, answer: str | None
) -> None:
    with pytest.raises(ConfigError, match="answer_pattern"):
        make_environment(path=path, answer=answer, answer_pattern=pattern)


async def test_a_gateway_passes_on_how_many_tasks_there_are(path: str) -> None:
    factory = functools.partial(make_environment, path=path, test_size=4)
    async with served(factory=factory) as (gateway, _):
        for address in (gateway.grpc_address, f"{gateway.http_address}/envs/{NAME}"):
            async with await AsyncEnvClient.connect(address) as client:
                assert (await client.describe()).tasks == TaskSet(60, 4, ("prompt", "solution"))


@pytest.mark.slow
async def test_workers_of_their_own_show_the_same_rows(path: str) -> None:
    factory = TargetFactory("prompts_env", {"path": path})
    options = ServerOptions(port=0, isolation="pool", num_workers=2)
    seeds = range(2 * NUM_ROWS)
    async with (
        EnvServer(factory, options) as up,
        await AsyncEnvClient.connect(up.grpc_address) as client,
    ):
        described = await client.describe()
        rows = []
        for seed in seeds:
            session, _ = await client.open(seed=seed)
            rows.append((await session.state())["row"])
            await session.close()
    assert described.tasks == TaskSet(NUM_ROWS, 0, ("prompt", "solution"))
    assert rows == rows_shown(make_environment(path=path), seeds)
