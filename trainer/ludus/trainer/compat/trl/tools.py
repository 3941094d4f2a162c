"""TRL's `tools` and `environment_factory`: completions call functions and methods.

    row --reset(**row)--> instance, one per episode      its text is appended to the last message
    prompt + tools --> completion --calls?-- yes --> results, never trained on --> completion ...
                                      no ---> end, get_reward()

A tool is a function with typed arguments and a docstring in Google's style, or a public method of
an environment. If a tool raises, its result is the error. The loop ends with a completion without
calls, after `max_tool_calling_iterations` rounds, or when max_completion_length is reached.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from transformers.utils import get_json_schema

from ludus.env import Message
from ludus.env.text.unicode import format_json
from ludus.proto.errors import ActionParseError, ConfigError
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.rollout.arguments import (
    RolloutTrainer,
    generate_rollout_completions,
    sample_completions,
)
from ludus.trainer.compat.trl.rollout.contract import find_signature
from ludus.trainer.core.functions import get_or_register_path
from ludus.trainer.models.chat import ChatTokenizer, count_chars, is_surely_longer
from ludus.trainer.models.messages import make_result
from ludus.trainer.models.tool_calls import ToolCall, ToolSpec

ToolFunction = Callable[..., Any]
EnvironmentFactory = Callable[[], Any]
EnvironmentFactories: TypeAlias = "EnvironmentFactory | Mapping[str, EnvironmentFactory]"

REWARD_COLUMN = "environment_reward"
TOOL_COLUMNS = frozenset({"environments", "num_tool_calls", "num_tool_calls_failed", REWARD_COLUMN})
"""Arguments of reward functions that are not columns of the data set."""
_NOT_TOOL_METHODS = ("reset", "get_reward")


def list_tool_methods(environment: type) -> list[str]:
    """Return the names of the methods of an environment class that completions may call."""
    return [
        name
        for name, _ in inspect.getmembers(environment, predicate=inspect.isfunction)
        if not name.startswith("_") and name not in _NOT_TOOL_METHODS
    ]


def find_environment_class(factory: EnvironmentFactory) -> type:
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


def make_function_spec(tool: ToolFunction) -> ToolSpec:
    """Return the specification of a tool, as chat templates list it."""
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
    specs: Sequence[ToolSpec]
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_mask: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_calls: int = 0
    num_failed: int = 0
    is_finished: bool = False

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool) -> None:
        """Append sampled tokens, or tokens of tool results."""
        self.completion_ids += token_ids
        self.logprobs += logprobs
        self.sampled_mask += [int(is_sampled)] * len(token_ids)


class ToolRollout:
    """A rollout function with the signature (prompts, trainer) for environments and tools."""

    __name__ = "tool_rollout"

    def __init__(
        self,
        tools: Sequence[ToolFunction],
        factories: Mapping[str | None, EnvironmentFactory],
        max_rounds: int | None,
    ) -> None:
        """Create the function.

        Args:
            factories: environment factory by the `environment` of a row. The key None is the
                factory for all rows.
        """
        self._tools = list(tools)
        self._factories = dict(factories)
        self.max_rounds = max_rounds
        classes = [find_environment_class(factory) for factory in factories.values()]
        methods = [
            getattr(environment_type, name)
            for environment_type in classes
            for name in list_tool_methods(environment_type)
        ]
        for tool in [*tools, *methods]:
            make_function_spec(tool)
        names = [
            environment_type.__name__
            for environment_type in classes
            if hasattr(environment_type, "get_reward")
        ]
        self.reward_name = "_".join(dict.fromkeys(names)) or None
        """Joined names of the environments that score episodes; None if no environment does."""
        if not tools and not methods:
            raise ConfigError(
                "environment_factory needs instances with public methods in addition to reset and "
                "get_reward, because completions call these methods; add one"
            )
        self._idle_instances: dict[str | None, deque[Any]] = {name: deque() for name in factories}
        """Instances that no episode uses, by the name of their factory."""
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
        """Play the episodes and return their rows, in which the results of tools are masked.

        Pass each row to `release_row` after its rewards are computed.
        """
        if self._chat is None:
            arguments = trainer.args.chat_template_kwargs or {}
            enable_thinking = bool(arguments.get("enable_thinking"))
            self._chat = ChatTokenizer(
                trainer.processing_class,
                end_token_ids=trainer.end_token_ids,
                enable_thinking=enable_thinking,
            )
        episodes = self._start_episodes(self._chat, prompts, trainer)
        while active_episodes := [episode for episode in episodes if not episode.is_finished]:
            self._play_round(self._chat, active_episodes, trainer)
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.completion_ids for episode in episodes],
            "logprobs": [episode.logprobs for episode in episodes],
            "env_mask": [episode.sampled_mask for episode in episodes],
            "environments": [episode.environment for episode in episodes],
            "num_tool_calls": [episode.num_calls for episode in episodes],
            "num_tool_calls_failed": [episode.num_failed for episode in episodes],
            REWARD_COLUMN: [_read_reward(episode.environment) for episode in episodes],
        }

    def release_row(self, fields: Mapping[str, Any]) -> None:
        """Let another episode use the environment of a row.

        An instance that is never released is not used again, and a new one replaces it.

        Args:
            fields: columns of the row in the data set, and those that `__call__` returned.
        """
        if self._factories:
            self._idle_instances[self._find_factory_name(fields)].append(fields["environments"])

    def _start_episodes(
        self, chat: ChatTokenizer, prompts: Sequence[list[Message]], trainer: RolloutTrainer
    ) -> list[_ToolEpisode]:
        episodes = []
        for prompt, row in zip(prompts, trainer.rows, strict=True):
            name = self._find_factory_name(row)
            environment = self._take_instance(name)
            messages = list(prompt)
            tools = {tool.__name__: tool for tool in self._tools}
            if environment is not None:
                hidden_names = {"prompt"} if name is None else {"prompt", "environment"}
                columns = {key: value for key, value in row.items() if key not in hidden_names}
                observation = environment.reset(prompt=prompt, **columns)
                messages = _append_observation(messages, observation)
                names = list_tool_methods(type(environment))
                tools |= {name: getattr(environment, name) for name in names}
            specs = [make_function_spec(tool) for tool in tools.values()]
            prompt_ids = chat.encode_first_prompt(messages, specs)
            episodes.append(_ToolEpisode(environment, tools, specs, prompt_ids))
        return episodes

    def _find_factory_name(self, row: Mapping[str, Any]) -> str | None:
        return row.get("environment") if None not in self._factories else None

    def _take_instance(self, name: str | None) -> Any:
        """Return an instance that no other episode uses, or None without a factory."""
        if not self._factories:
            return None
        try:
            return self._idle_instances[name].popleft()
        except IndexError:
            return self._factories[name]()

    def _play_round(
        self, chat: ChatTokenizer, active_episodes: Sequence[_ToolEpisode], trainer: RolloutTrainer
    ) -> None:
        """Sample one completion for each episode, and call its tools."""
        max_tokens = int(trainer.max_completion_length)
        token_limits = [max_tokens - len(episode.completion_ids) for episode in active_episodes]
        sent_ids = [[*episode.prompt_ids, *episode.completion_ids] for episode in active_episodes]
        outputs = generate_rollout_completions(
            trainer, sent_ids, generation_overrides={"max_tokens": max(token_limits)}
        )
        for episode, output, limit in zip(active_episodes, outputs, token_limits, strict=True):
            token_ids = output["completion_ids"][:limit]
            episode.add(token_ids, output["logprobs"][:limit], is_sampled=True)
            messages = self._call_tools(chat, episode, chat.decode(token_ids))
            has_ended = token_ids[-1] in chat.end_token_ids
            added_ids, is_too_long = [], is_surely_longer(count_chars(messages), max_tokens)
            if messages and not is_too_long:
                added_ids = chat.encode_next_prompt(
                    messages, has_end_token=has_ended, end_token_id=token_ids[-1]
                )
            is_last = self.max_rounds is not None and episode.num_rounds >= self.max_rounds
            has_room = not is_too_long and len(episode.completion_ids) + len(added_ids) < max_tokens
            if not messages or is_last or not has_room:
                episode.is_finished = True
                continue
            episode.num_rounds += 1
            episode.add(added_ids, [0.0] * len(added_ids), is_sampled=False)

    def _call_tools(
        self, chat: ChatTokenizer, episode: _ToolEpisode, text: str
    ) -> Sequence[Message]:
        """Return the results of a completion's calls as messages; empty without calls."""
        try:
            calls = chat.call_form.read_calls(chat.thoughts.get_answer(text), episode.specs)
        except ActionParseError as error:
            episode.num_calls += 1
            episode.num_failed += 1
            return [{"role": "tool", "content": str(error)}]
        return [make_result(call, self._call_tool(episode, call)) for call in calls]

    def _call_tool(self, episode: _ToolEpisode, call: ToolCall) -> str:
        episode.num_calls += 1
        tool = episode.tools.get(call.name)
        if tool is None:
            episode.num_failed += 1
            return f"error: there is no tool '{call.name}', only {sorted(episode.tools)}"
        try:
            result = _wait_for(tool(**call.arguments))
            return result if isinstance(result, str) else format_json(result, default=str)
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
    """Return the prompt with the observation of `reset` appended."""
    if observation is None:
        return messages
    if not isinstance(observation, str):
        raise ConfigError(
            f"environment_factory: reset must return text or None, got {observation!r:.80}"
        )
    role, content = messages[-1]["role"], messages[-1]["content"] + observation
    return [*messages[:-1], {"role": role, "content": content}]


def _read_reward(environment: Any) -> float | None:
    get_reward = getattr(environment, "get_reward", None)
    if get_reward is None:
        return None
    reward = _wait_for(get_reward())
    return None if reward is None else float(reward)


def _wait_for(result: Any) -> Any:
    """Return the result of a call; if it is awaitable, wait for it."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


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
    find_signature(rollout_func, get_or_register_path(rollout_func))
    return rollout_func
