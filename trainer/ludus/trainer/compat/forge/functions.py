"""Adapters from functions in Forge's form to functions of a run."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env import Message
from ludus.trainer.compat.checks import check_function


@dataclass(frozen=True, slots=True)
class CustomFunctions:
    """Functions of a script that replace those of a run; None keeps the default."""

    reward: Any = None
    compute_advantages: Any = None
    render: Callable[..., Any] | None = None
    parse: Callable[..., Any] | None = None

    def add_to(self, config: dict[str, Any]) -> None:
        """Add the functions to the configuration of a run, for every environment."""
        rewards = None if self.reward is None else [{"function": make_reward_term(self.reward)}]
        fields = {"rewards": rewards, "render": self.render, "parse": self.parse}
        for section in config.get("environments", {}).values():
            section |= {name: value for name, value in fields.items() if value is not None}
        if self.compute_advantages is not None:
            # The fields that the function replaces get neutral values.
            neutral_fields = {"baseline": "mean", "scale": "none", "credit": "episode"}
            advantages = {"advantages": make_group_function(self.compute_advantages)}
            config["algorithm"] = config.get("algorithm", {}) | neutral_fields | advantages


NO_FUNCTIONS = CustomFunctions()


def make_reward_term(reward: Any) -> Callable[..., Awaitable[list[float | None]]]:
    """Return a reward term that calls `reward`, or its method `evaluate_response`."""
    evaluate = _get_method(reward, "evaluate_response")
    check_function("reward", evaluate, ("prompt", "response", "game_reward"), by_name=True)

    async def evaluate_response(
        prompts: Sequence[list[Message]],
        completions: Sequence[list[Message]],
        episode_return: Sequence[float],
    ) -> list[float | None]:
        """Compute each episode's reward from its first prompt, last response and return."""
        outputs = [
            evaluate(
                prompt=_join_messages(prompt),
                response=_find_last_response(messages),
                game_reward=game_reward,
            )
            for prompt, messages, game_reward in zip(
                prompts, completions, episode_return, strict=True
            )
        ]
        rewards = [await output if inspect.isawaitable(output) else output for output in outputs]
        return [None if reward is None else float(reward) for reward in rewards]

    return evaluate_response


def make_group_function(compute_advantages: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function of a group: `compute_advantages`, or its method `compute`."""
    compute = _get_method(compute_advantages, "compute")
    check_function("compute_advantages", compute, ("group",))
    return compute


def _get_method(owner: Any, name: str) -> Callable[..., Any]:
    owner = owner() if inspect.isclass(owner) else owner
    method: Callable[..., Any] = getattr(owner, name, owner)
    return method


def _join_messages(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _find_last_response(messages: Sequence[Message]) -> str:
    responses = [message["content"] for message in messages if message["role"] == "assistant"]
    return responses[-1] if responses else ""
