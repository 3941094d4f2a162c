"""TRL's `tools` and `environment_factory`: completions call functions and methods.

    row --reset(**row)--> instance, one per episode      its value is appended to the last message
    prompt + tools --> completion --calls?-- yes --> results, never trained on --> completion ...
                                      no ---> end, get_reward()

A tool is a function with typed arguments and a docstring in Google's style, or a public method of
an environment. If a tool raises, its result is the error. The loop ends with a completion without
calls, after `max_tool_calling_iterations` rounds, or when max_completion_length is reached.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from transformers.utils import get_json_schema

from ludus.env import Message
from ludus.proto.errors import ActionParseError, ConfigError
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.rollout.arguments import (
    RolloutTrainer,
    generate_rollout_completions,
    sample_completions,
)
from ludus.trainer.compat.trl.rollout.contract import find_signature
from ludus.trainer.core.functions import function_path
from ludus.trainer.models.chat import ChatTokenizer, ToolSpec, strip_reasoning
from ludus.trainer.rollout.adapters.tool_adapter import ToolCall, read_calls

ToolFunction = Callable[..., Any]
EnvironmentFactory = Callable[[], Any]
EnvironmentFactories: TypeAlias = "EnvironmentFactory | Mapping[str, EnvironmentFactory]"

REWARD_COLUMN = "environment_reward"
COLUMNS = frozenset(
    {"environments", "num_tool_calls", "num_tool_calls_failed", REWARD_COLUMN},
)
"""Arguments of reward functions in addition to the data set's columns."""
_NOT_TOOLS = ("reset", "get_reward")


def tool_methods(environment: type) -> list[str]:
    """Return the names of the methods of an environment class that completions may call."""
    return [
        name
        for name, _ in inspect.getmembers(environment, predicate=inspect.isfunction)
        if not name.startswith("_") and name not in _NOT_TOOLS
    ]


def environment_class(factory: EnvironmentFactory) -> type:
    """Return the class of a factory's instances."""
    if not callable(factory):
        raise ConfigError(
            "environment_factory must be a class, or a function that returns an instance, but it "
            f"is {factory!r}"
        )
    environment_type = factory if inspect.isclass(factory) else type(factory())
    if not callable(getattr(environment_type, "reset", None)):
        raise ConfigError(
            f"environment_factory needs instances with a `reset` method; add it to "
            f"{environment_type!r}"
        )
    return environment_type


def function_spec(tool: ToolFunction) -> ToolSpec:
    """Return the tool in the form that chat templates list."""
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ConfigError(
            f"tool '{getattr(tool, '__name__', tool)}' needs typed arguments and a docstring with "
            f"an Args section in Google's style: {error}"
        ) from error


@dataclass(slots=True)
class _ToolEpisode:
    """A running episode."""

    environment: Any
    tools: Mapping[str, ToolFunction]
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_calls: int = 0
    num_failed: int = 0
    is_over: bool = False

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        """Append tokens."""
        self.completion_ids += token_ids
        self.logprobs += logprobs
        self.mask += [int(sampled)] * len(token_ids)


class ToolRollout:
    """A rollout function with the signature (prompts, trainer) for environments and tools."""

    __name__ = "tool_rollout"

    def __init__(
        self,
        tools: Sequence[ToolFunction],
        factories: Mapping[str | None, EnvironmentFactory],
        max_rounds: int | None,
    ) -> None:
        """Create the function from factories by `environment` of a row; None is every row."""
        self._tools = list(tools)
        self._factories = dict(factories)
        self.max_rounds = max_rounds
        classes = [environment_class(factory) for factory in factories.values()]
        methods = [getattr(kind, name) for kind in classes for name in tool_methods(kind)]
        for tool in [*tools, *methods]:
            function_spec(tool)
        names = [kind.__name__ for kind in classes if hasattr(kind, "get_reward")]
        self.reward_name = "_".join(dict.fromkeys(names)) or None
        """Joined names of the environments that score episodes; None if none does."""
        if not tools and not methods:
            raise ConfigError(
                "environment_factory needs instances with public methods in addition to reset and "
                "get_reward, because completions call these methods; add one"
            )
        self._pools: dict[tuple[str | None, bool], list[Any]] = {}
        self._chat: ChatTokenizer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Environment instances stay in their process.
        return type(self), (self._tools, self._factories, self.max_rounds)

    def check_rows(self, rows: Sequence[Mapping[str, Any]], dataset: str) -> None:
        """Check that the rows of the data set `dataset` can be played with tools."""
        for number, row in enumerate(rows):
            if isinstance(row["prompt"], str):
                raise ConfigError(
                    f"{dataset}: row {number} has a prompt of text, but tools and "
                    "environment_factory need messages; write [{'role': 'user', 'content': '...'}]"
                )
            name = row.get("environment")
            if self._factories and None not in self._factories and name not in self._factories:
                raise ConfigError(
                    f"{dataset}: row {number} has environment = {name!r:.60}, expected one of "
                    f"{list(self._factories)}"
                )

    def __call__(self, prompts: Sequence[list[Message]], trainer: RolloutTrainer) -> dict[str, Any]:
        """Return rows of whole episodes, in which the results of tools are masked."""
        if self._chat is None:
            thinks = bool((trainer.args.chat_template_kwargs or {}).get("enable_thinking"))
            self._chat = ChatTokenizer(trainer.processing_class, enable_thinking=thinks)
        episodes = self._start(self._chat, prompts, trainer)
        while playing := [episode for episode in episodes if not episode.is_over]:
            self._play_round(self._chat, playing, trainer)
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.completion_ids for episode in episodes],
            "logprobs": [episode.logprobs for episode in episodes],
            "env_mask": [episode.mask for episode in episodes],
            "environments": [episode.environment for episode in episodes],
            "num_tool_calls": [episode.num_calls for episode in episodes],
            "num_tool_calls_failed": [episode.num_failed for episode in episodes],
            REWARD_COLUMN: [_read_reward(episode.environment) for episode in episodes],
        }

    def _start(
        self, chat: ChatTokenizer, prompts: Sequence[list[Message]], trainer: RolloutTrainer
    ) -> list[_ToolEpisode]:
        last_number: dict[str | None, int] = {}
        episodes = []
        for prompt, row in zip(prompts, trainer.rows, strict=True):
            name = row.get("environment") if None not in self._factories else None
            number = last_number[name] = last_number.get(name, -1) + 1
            environment = self._instance(name, number, is_evaluation=trainer.state.is_evaluation)
            messages = list(prompt)
            tools = {tool.__name__: tool for tool in self._tools}
            if environment is not None:
                hidden_names = {"prompt"} if name is None else {"prompt", "environment"}
                columns = {key: value for key, value in row.items() if key not in hidden_names}
                messages = _append_observation(
                    messages, environment.reset(prompt=prompt, **columns)
                )
                names = tool_methods(type(environment))
                tools |= {name: getattr(environment, name) for name in names}
            specs = [function_spec(tool) for tool in tools.values()]
            episodes.append(
                _ToolEpisode(environment, tools, chat.encode_first_prompt(messages, specs))
            )
        return episodes

    def _instance(self, name: str | None, number: int, *, is_evaluation: bool) -> Any:
        """Return an instance that no other episode of this call uses; None without a factory."""
        if not self._factories:
            return None
        # An evaluation may run before the rewards of a training call are read.
        pool = self._pools.setdefault((name, is_evaluation), [])
        while len(pool) <= number:
            pool.append(self._factories[name]())
        return pool[number]

    def _play_round(
        self, chat: ChatTokenizer, playing: Sequence[_ToolEpisode], trainer: RolloutTrainer
    ) -> None:
        """Sample one completion for each episode, and call its tools."""
        max_tokens = int(trainer.max_completion_length)
        rooms = [max_tokens - len(episode.completion_ids) for episode in playing]
        sent_ids = [[*episode.prompt_ids, *episode.completion_ids] for episode in playing]
        outputs = generate_rollout_completions(
            trainer, sent_ids, generation_overrides={"max_tokens": max(rooms)}
        )
        for episode, output, room in zip(playing, outputs, rooms, strict=True):
            ids = output["completion_ids"][:room]
            episode.add(ids, output["logprobs"][:room], sampled=True)
            results = self._call_all(episode, chat.decode(ids))
            has_ended = ids[-1] == chat.end_token_id
            added_ids = chat.encode_next_prompt(results, ended=has_ended) if results else []
            is_last = self.max_rounds is not None and episode.num_rounds >= self.max_rounds
            fits = len(episode.completion_ids) + len(added_ids) < max_tokens
            if not results or is_last or not fits:
                episode.is_over = True
                continue
            episode.num_rounds += 1
            episode.add(added_ids, [0.0] * len(added_ids), sampled=False)

    def _call_all(self, episode: _ToolEpisode, text: str) -> list[Message]:
        """Return the results of a completion's calls as messages; empty without calls."""
        try:
            calls = read_calls(strip_reasoning(text))
        except ActionParseError as error:
            episode.num_calls += 1
            episode.num_failed += 1
            return [{"role": "tool", "content": str(error)}]
        return [{"role": "tool", "content": self._call(episode, call)} for call in calls]

    def _call(self, episode: _ToolEpisode, call: ToolCall) -> str:
        episode.num_calls += 1
        tool = episode.tools.get(call.name)
        if tool is None:
            episode.num_failed += 1
            return f"error: there is no tool '{call.name}', only {sorted(episode.tools)}"
        try:
            returned = _wait_for(tool(**call.arguments))
            return returned if isinstance(returned, str) else json.dumps(returned, default=str)
        except SystemExit as error:
            episode.num_failed += 1
            return f"error: SystemExit({error.code!r})"
        except Exception as error:  # noqa: BLE001 - the policy sees the error
            episode.num_failed += 1
            return f"error: {error}"


def environment_reward(environment_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the values of each episode's `get_reward`."""
    return environment_reward


def _append_observation(messages: list[Message], observation: Any) -> list[Message]:
    """Return the prompt with the value of `reset` appended."""
    if observation is None:
        return messages
    if not isinstance(observation, str):
        raise ConfigError(
            f"environment_factory: reset must return text or None, got {observation!r:.80}"
        )
    extended: Message = {
        "role": messages[-1]["role"],
        "content": messages[-1]["content"] + observation,
    }
    return [*messages[:-1], extended]


def _read_reward(environment: Any) -> float | None:
    get_reward = getattr(environment, "get_reward", None)
    if get_reward is None:
        return None
    reward = _wait_for(get_reward())
    return None if reward is None else float(reward)


def _wait_for(returned: Any) -> Any:
    """Return the result of a call, also of a coroutine function."""

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait()) if inspect.isawaitable(returned) else returned


def choose_rollout(
    rollout_func: Callable[..., Any] | None,
    tools: Sequence[ToolFunction] | None,
    environment_factory: EnvironmentFactories | None,
    args: GRPOConfig,
) -> Callable[..., Any]:
    """Return the function that plays a script's episodes."""
    if not tools and environment_factory is None:
        return sample_completions if rollout_func is None else _check_function(rollout_func)
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func plays the episodes itself, so tools and environment_factory would be "
            "ignored; pass either rollout_func or the others"
        )
    factories: dict[str | None, EnvironmentFactory] = {}
    if isinstance(environment_factory, Mapping):
        factories.update(environment_factory)
    elif environment_factory is not None:
        factories[None] = environment_factory
    return ToolRollout(tools or (), factories, args.max_tool_calling_iterations)


def _check_function(rollout_func: Any) -> Callable[..., Any]:
    """Return the function if it has one of TRL's signatures."""
    if not callable(rollout_func):
        raise ConfigError(f"rollout_func must be a function, but it is {rollout_func!r:.80}")
    find_signature(rollout_func, function_path(rollout_func))
    return rollout_func
