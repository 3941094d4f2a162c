"""TRL's tools and environments, with scripted completions and real methods."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl import GRPOConfig, GRPOTrainer
from ludus.trainer.compat.trl.rollout.arguments import RolloutTrainer, RolloutTrainerState
from ludus.trainer.compat.trl.tools import REWARD_COLUMN, ToolRollout, environment_reward
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer

TOOL_CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


class Counter:
    """An environment with a running total."""

    def reset(self, start: int = 0, **columns: Any) -> str:
        """Set the total to `start`; return the initial text."""
        self.total = start
        self.columns = columns
        return f" from {start}"

    def add(self, n: int) -> int:
        """
        Add a number.

        Args:
            n: the number to add.
        """
        if n < 0:
            raise ValueError("no negative numbers")
        self.total += n
        return self.total

    async def double(self) -> str:
        """Double the total."""
        await asyncio.sleep(0)
        self.total *= 2
        return str(self.total)

    def get_reward(self) -> float:
        """Return the total."""
        return float(self.total)


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(["count add double from total"] * 5, 320))


class ScriptTrainer(RolloutTrainer):
    """A trainer that samples scripted responses, with a log-prob of -1 for each token.

    Args:
        script: responses of each episode.
    """

    def __init__(self, chat: ChatTokenizer, rows: list[dict[str, Any]], script: list[list[str]]):
        self._chat = chat
        self._script = [iter(responses) for responses in script]
        self._row_by_prompt: dict[tuple[int, ...], int] = {}
        self.rows = rows
        self.processing_class = chat.tokenizer
        self.state = RolloutTrainerState(0)
        self.args = SimpleNamespace(chat_template_kwargs=None)
        self.max_completion_length = 400
        self.calls: list[list[list[int]]] = []

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self._chat.end_token_ids

    def generate_rollout_completions(self, prompts: Any, overrides: Any, as_chat: Any) -> Any:
        if not self.calls:
            self._prefixes = [list(prompt) for prompt in prompts]
        self.calls.append([list(prompt) for prompt in prompts])
        outputs = []
        for prompt in prompts:
            row = next(
                n for n, prefix in enumerate(self._prefixes) if prompt[: len(prefix)] == prefix
            )
            ids = self._chat.encode_completion(next(self._script[row]))[: overrides["max_tokens"]]
            outputs.append(
                {
                    "prompt_ids": prompt,
                    "completion_ids": ids,
                    "logprobs": [-1.0] * len(ids),
                    "text": self._chat.decode(ids),
                }
            )
        return outputs


def make_prompts(rows: list[dict[str, Any]]) -> list[Any]:
    return [[{"role": "user", "content": "count"}] for _ in rows]


def test_tools_are_called_until_a_response_has_no_call(chat: ChatTokenizer) -> None:
    rows: list[dict[str, Any]] = [{"start": 1, "level": "a"}, {"start": 5}]
    trainer = ScriptTrainer(
        chat,
        rows,
        [
            [TOOL_CALL % ("add", '{"n": 2}'), TOOL_CALL % ("double", "{}"), "done"],
            [TOOL_CALL % ("add", '{"n": -1}') + TOOL_CALL % ("fly", "{}"), "give up"],
        ],
    )
    columns = ToolRollout([], {None: Counter}, None)(make_prompts(rows), trainer)
    assert columns[REWARD_COLUMN] == [6.0, 5.0]
    assert environment_reward(**{REWARD_COLUMN: columns[REWARD_COLUMN]}) == [6.0, 5.0]
    assert (columns["num_tool_calls"], columns["num_tool_calls_failed"]) == ([2, 2], [0, 2])
    assert columns["environments"][0].columns["level"] == "a"
    first_text, second_text = [chat.decode(ids) for ids in columns["completion_ids"]]
    assert "done" in first_text
    assert "no negative numbers" in second_text and "no tool 'fly'" in second_text
    for ids, logprobs, mask in zip(
        columns["completion_ids"], columns["logprobs"], columns["env_mask"], strict=True
    ):
        assert len(ids) == len(logprobs) == len(mask)
        assert {1: -1.0, 0: 0.0}[mask[0]] == logprobs[0]
        assert [-1.0 if is_sampled else 0.0 for is_sampled in mask] == logprobs
    # Every prompt starts with an earlier prompt, so no text is encoded twice.
    for previous, current in zip(trainer.calls, trainer.calls[1:], strict=False):
        assert any(current[0][: len(prompt)] == prompt for prompt in previous)
    assert "from 1" in chat.decode(columns["prompt_ids"][0])
    assert "Add a number." in chat.decode(columns["prompt_ids"][0])


def test_tool_error_becomes_the_tool_result(
    chat: ChatTokenizer,
) -> None:
    def exit_program(code: int) -> str:
        """
        Exit the program.

        Args:
            code: the exit code.
        """
        raise SystemExit(code)

    def make_circle() -> list[Any]:
        """Return a list that contains itself."""
        circular: list[Any] = []
        return [*circular, circular.append(circular) or circular]

    script = [
        [TOOL_CALL % ("exit_program", '{"code": 3}'), TOOL_CALL % ("make_circle", "{}"), "done"]
    ]
    columns = ToolRollout([exit_program, make_circle], {}, None)(
        make_prompts([{}]), ScriptTrainer(chat, [{}], script)
    )
    text = chat.decode(columns["completion_ids"][0])
    assert "error: SystemExit(3)" in text and "error: Circular reference" in text
    assert columns["num_tool_calls_failed"] == [2]


def test_tool_result_is_shown_without_escapes(chat: ChatTokenizer) -> None:
    def find_word() -> dict[str, str]:
        """Find a word."""
        return {"word": "漢字 ß"}

    trainer = ScriptTrainer(chat, [{}], [[TOOL_CALL % ("find_word", "{}"), "done"]])
    columns = ToolRollout([find_word], {}, None)(make_prompts([{}]), trainer)
    assert '{"word": "漢字 ß"}' in chat.decode(columns["completion_ids"][0])


def test_limits_on_calls_and_length_end_an_episode(chat: ChatTokenizer) -> None:
    rows: list[dict[str, Any]] = [{}]
    script = [[TOOL_CALL % ("add", '{"n": 1}')] * 50]
    columns = ToolRollout([], {None: Counter}, 2)(
        make_prompts(rows), ScriptTrainer(chat, rows, script)
    )
    assert columns[REWARD_COLUMN] == [3.0], "wrong number of tool calls"
    assert columns["env_mask"][0][-1] == 1
    trainer = ScriptTrainer(chat, rows, script)
    trainer.max_completion_length = 90
    columns = ToolRollout([], {None: Counter}, None)(make_prompts(rows), trainer)
    assert len(columns["completion_ids"][0]) <= 90
    assert columns["env_mask"][0][-1] == 1


def test_long_tool_result_ends_an_episode_without_encoding(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_file() -> str:
        """Read a file."""
        return "x" * 1_000_000

    def refuse(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("a long text was encoded")

    monkeypatch.setattr(ChatTokenizer, "encode_next_prompt", refuse)
    trainer = ScriptTrainer(chat, [{}], [[TOOL_CALL % ("read_file", "{}"), "done"]])
    columns = ToolRollout([read_file], {}, None)(make_prompts([{}]), trainer)
    assert columns["num_tool_calls"] == [1]
    assert set(columns["env_mask"][0]) == {1}


def test_rows_select_environments_by_name(chat: ChatTokenizer) -> None:
    class SilentCounter(Counter):
        pass

    rows: list[dict[str, Any]] = [
        {"environment": "silent", "start": 1},
        {"environment": "loud", "start": 2},
    ]
    rollout = ToolRollout([], {"loud": Counter, "silent": SilentCounter}, None)
    columns = rollout(make_prompts(rows), ScriptTrainer(chat, rows, [["done"], ["done"]]))
    assert [type(environment) for environment in columns["environments"]] == [
        SilentCounter,
        Counter,
    ]
    messages = {"prompt": [{"role": "user", "content": "count"}]}
    with pytest.raises(ConfigError, match="row 0 has environment = None"):
        rollout.check_rows([messages], "train_dataset")


def test_a_pickled_rollout_has_no_tool_instances(chat: ChatTokenizer) -> None:
    rollout = ToolRollout([], {None: Counter}, 3)
    rollout([], ScriptTrainer(chat, [], []))
    assert pickle.loads(pickle.dumps(rollout)).max_rounds == 3


def test_invalid_tools_are_refused_before_the_start(tmp_path: Any) -> None:
    class UntypedCounter(Counter):
        def guess(self, number):  # type: ignore[no-untyped-def]
            """Guess."""

    class CounterWithoutReset:
        def add(self, n: int) -> int:
            return n

    args = GRPOConfig(str(tmp_path / "run"), max_completion_length=8)
    rows = [{"prompt": [{"role": "user", "content": "count"}]}] * 8
    model_config = {"kind": "tiny"}
    for factory, message in (
        (UntypedCounter, "tool 'guess' needs typed arguments"),
        (CounterWithoutReset, "a `reset` method"),
    ):
        with pytest.raises(ConfigError, match=message):
            GRPOTrainer(model_config, args=args, train_dataset=rows, environment_factory=factory)

    def score_wisdom(completions: list[Any], wisdom: list[Any]) -> list[float]:
        return [0.0 for _ in completions]

    def score_calls(completions: list[Any], num_tool_calls: list[int]) -> list[float]:
        return [float(number) for number in num_tool_calls]

    for fields, message in (
        (
            {"reward_funcs": [score_calls, score_wisdom]},
            "'score_wisdom' requires 'wisdom', which train_dataset",
        ),
        ({"train_dataset": [{"prompt": "count"}] * 8}, "train_dataset: row 0 has a prompt of text"),
    ):
        arguments = {"train_dataset": rows, "environment_factory": Counter, **fields}
        with pytest.raises(ConfigError, match=message):
            GRPOTrainer(model_config, args=args, **arguments)
    with pytest.raises(ConfigError, match="would be ignored"):
        GRPOTrainer(
            model_config,
            args=args,
            train_dataset=rows,
            environment_factory=Counter,
            rollout_func=lambda prompts, trainer: {},
        )
    trainer = GRPOTrainer(model_config, args=args, train_dataset=rows, environment_factory=Counter)
    [term] = trainer.run.environment.rewards
    assert (term.name, term.weight) == ("Counter", 1.0)
