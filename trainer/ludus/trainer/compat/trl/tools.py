"""TRL's `tools` and `environment_factory`: answers call functions, and methods of an instance each.

    row --reset(**row)--> instance, one per episode      what it returns goes on the last message
    prompt + tools --> answer --calls?-- yes --> results, never trained on --> answer ...
                                  no ---> the end, get_reward()

A tool is a plain function with typed arguments and a docstring of Google's style, or a public
method of an environment. One that raises is answered with its error. The loop ends with an answer
that calls nothing, after `max_tool_calling_iterations` rounds, or when max_completion_length is
used up.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import get_json_schema

from ludus.env import Message
from ludus.proto.errors import ActionParseError, ConfigError
from ludus.trainer.compat.trl.completions import generate_rollout_completions
from ludus.trainer.models.chat import ChatTokenizer, strip_reasoning
from ludus.trainer.models.template import ToolSpec
from ludus.trainer.rollout.batch.arguments import RolloutTrainer
from ludus.trainer.rollout.tool_calls import ToolCall, read_calls

Tool = Callable[..., Any]
Factory = Callable[[], Any]

REWARD_COLUMN = "environment_reward"
COLUMNS = frozenset(
    {"environments", "num_tool_calls", "num_tool_calls_failed", REWARD_COLUMN},
)
"""What reward functions are told beside the data set's columns."""
_NOT_TOOLS = ("reset", "get_reward")


def methods_of(kind: type) -> list[str]:
    """The names of the methods of an environment that answers may call."""
    return [
        name
        for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)
        if not name.startswith("_") and name not in _NOT_TOOLS
    ]


def kind_of_factory(factory: Factory) -> type:
    """What a factory makes.

    Raises:
        ConfigError: it has no `reset`.
    """
    if not callable(factory):
        raise ConfigError(
            f"environment_factory expected a class or a function that makes one, got {factory!r}"
        )
    kind = factory if inspect.isclass(factory) else type(factory())
    if not callable(getattr(kind, "reset", None)):
        raise ConfigError(
            f"environment_factory expected to make instances with a `reset` method, got {kind!r}"
        )
    return kind


def spec_of(tool: Tool) -> ToolSpec:
    """The tool as chat templates list it.

    Raises:
        ConfigError: its arguments have no types, or its docstring says nothing of them.
    """
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ConfigError(
            f"tool '{getattr(tool, '__name__', tool)}' expected typed arguments and a docstring "
            f"with an Args section in Google's style: {error}"
        ) from error


@dataclass(slots=True)
class _Episode:
    """One episode under way."""

    environment: Any
    tools: Mapping[str, Tool]
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_calls: int = 0
    num_failed: int = 0
    is_over: bool = False

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        """Take tokens in."""
        self.completion_ids += token_ids
        self.logprobs += logprobs
        self.mask += [int(sampled)] * len(token_ids)


class ToolRollout:
    """A rollout function of the form (prompts, trainer) for environments and tools."""

    __name__ = "tool_rollout"

    def __init__(
        self, tools: Sequence[Tool], factories: Mapping[str | None, Factory], max_rounds: int | None
    ) -> None:
        """`factories` are by the rows' `environment`; one under None is every row's.

        Raises:
            ConfigError: a tool cannot be described, or nothing can be called.
        """
        self._tools = list(tools)
        self._factories = dict(factories)
        self._max_rounds = max_rounds
        kinds = [kind_of_factory(factory) for factory in factories.values()]
        described = [getattr(kind, name) for kind in kinds for name in methods_of(kind)]
        for tool in [*tools, *described]:
            spec_of(tool)
        if not tools and not described:
            raise ConfigError(
                "environment_factory expected instances with public methods beside reset and "
                "get_reward, got none; those are what answers call"
            )
        self._pools: dict[tuple[str | None, bool], list[Any]] = {}
        self._chat: ChatTokenizer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Instances stay where they were made.
        return type(self), (self._tools, self._factories, self._max_rounds)

    def check_rows(self, rows: Sequence[Mapping[str, Any]], dataset: str) -> None:
        """Check that the rows of the data set of that name can be played so.

        Raises:
            ConfigError: a prompt is text, or a row names no environment that there is.
        """
        for number, row in enumerate(rows):
            if isinstance(row["prompt"], str):
                raise ConfigError(
                    f"{dataset}: row {number} expected a prompt of messages, which tools and "
                    "environment_factory need, got text; write [{'role': 'user', 'content': "
                    "'...'}]"
                )
            name = row.get("environment")
            if self._factories and None not in self._factories and name not in self._factories:
                raise ConfigError(
                    f"{dataset}: row {number} expected an 'environment' out of "
                    f"{list(self._factories)}, got {name!r:.60}"
                )

    def __call__(self, prompts: Sequence[list[Message]], trainer: RolloutTrainer) -> dict[str, Any]:
        """Rows of whole episodes; what tools said is masked."""
        if self._chat is None:
            thinks = bool((trainer.args.chat_template_kwargs or {}).get("enable_thinking"))
            self._chat = ChatTokenizer(trainer.processing_class, enable_thinking=thinks)
        episodes = self._begin(self._chat, prompts, trainer)
        while playing := [one for one in episodes if not one.is_over]:
            self._round(self._chat, playing, trainer)
        return {
            "prompt_ids": [one.prompt_ids for one in episodes],
            "completion_ids": [one.completion_ids for one in episodes],
            "logprobs": [one.logprobs for one in episodes],
            "env_mask": [one.mask for one in episodes],
            "environments": [one.environment for one in episodes],
            "num_tool_calls": [one.num_calls for one in episodes],
            "num_tool_calls_failed": [one.num_failed for one in episodes],
            REWARD_COLUMN: [_reward_of(one.environment) for one in episodes],
        }

    def _begin(
        self, chat: ChatTokenizer, prompts: Sequence[list[Message]], trainer: RolloutTrainer
    ) -> list[_Episode]:
        taken: dict[str | None, int] = {}
        episodes = []
        for prompt, row in zip(prompts, trainer.rows, strict=True):
            name = row.get("environment") if None not in self._factories else None
            number = taken[name] = taken.get(name, -1) + 1
            environment = self._instance(name, number, is_judged=trainer.state.is_evaluation)
            messages = list(prompt)
            tools = {tool.__name__: tool for tool in self._tools}
            if environment is not None:
                hidden = {"prompt"} if name is None else {"prompt", "environment"}
                columns = {key: value for key, value in row.items() if key not in hidden}
                messages = _with_observation(messages, environment.reset(prompt=prompt, **columns))
                names = methods_of(type(environment))
                tools |= {name: getattr(environment, name) for name in names}
            specs = [spec_of(tool) for tool in tools.values()]
            episodes.append(_Episode(environment, tools, chat.first_prompt(messages, specs)))
        return episodes

    def _instance(self, name: str | None, number: int, *, is_judged: bool) -> Any:
        """One that no other episode of this call has; None where there are tools alone."""
        if not self._factories:
            return None
        # An evaluation may run beside training, whose rewards are still to be asked for.
        pool = self._pools.setdefault((name, is_judged), [])
        while len(pool) <= number:
            pool.append(self._factories[name]())
        return pool[number]

    def _round(
        self, chat: ChatTokenizer, playing: Sequence[_Episode], trainer: RolloutTrainer
    ) -> None:
        """One answer of each, and what its calls return."""
        most = int(trainer.max_completion_length)
        rooms = [most - len(one.completion_ids) for one in playing]
        sent = [[*one.prompt_ids, *one.completion_ids] for one in playing]
        answers = generate_rollout_completions(
            trainer, sent, generation_overrides={"max_tokens": max(rooms)}
        )
        for one, answer, room in zip(playing, answers, rooms, strict=True):
            ids = answer["completion_ids"][:room]
            one.add(ids, answer["logprobs"][:room], sampled=True)
            results = self._results(one, chat.decode(ids))
            ended = ids[-1] == chat.end_token_id
            added = chat.next_prompt(results, ended=ended) if results else []
            is_last = self._max_rounds is not None and one.num_rounds >= self._max_rounds
            fits = len(one.completion_ids) + len(added) < most
            if not results or is_last or not fits:
                one.is_over = True
                continue
            one.num_rounds += 1
            one.add(added, [0.0] * len(added), sampled=False)

    def _results(self, episode: _Episode, text: str) -> list[Message]:
        """What the calls of an answer return, as messages; none where it calls nothing."""
        try:
            calls = read_calls(strip_reasoning(text))
        except ActionParseError as error:
            episode.num_calls += 1
            episode.num_failed += 1
            return [{"role": "tool", "content": str(error)}]
        return [{"role": "tool", "content": self._called(episode, call)} for call in calls]

    def _called(self, episode: _Episode, call: ToolCall) -> str:
        episode.num_calls += 1
        tool = episode.tools.get(call.name)
        if tool is None:
            episode.num_failed += 1
            return f"error: there is no tool '{call.name}', only {sorted(episode.tools)}"
        try:
            returned = tool(**call.arguments)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
            return returned if isinstance(returned, str) else json.dumps(returned, default=str)
        except SystemExit as error:
            episode.num_failed += 1
            return f"error: SystemExit({error.code!r})"
        except Exception as error:  # noqa: BLE001 - the policy is told, as by any tool
            episode.num_failed += 1
            return f"error: {error}"


def environment_reward(environment_reward: list[float | None], **_: Any) -> list[float | None]:
    """What each episode's `get_reward` said."""
    return environment_reward


def _with_observation(messages: list[Message], observation: Any) -> list[Message]:
    """The prompt, with what `reset` returned at its end."""
    if observation is None:
        return messages
    if not isinstance(observation, str):
        raise ConfigError(
            f"environment_factory: reset expected to return text or None, got {observation!r:.80}"
        )
    last: Message = {"role": messages[-1]["role"], "content": messages[-1]["content"] + observation}
    return [*messages[:-1], last]


def _reward_of(environment: Any) -> float | None:
    get_reward = getattr(environment, "get_reward", None)
    if get_reward is None:
        return None
    reward = get_reward()
    if inspect.isawaitable(reward):
        reward = asyncio.run(_awaited(reward))
    return None if reward is None else float(reward)


async def _awaited(value: Any) -> Any:
    return await value
