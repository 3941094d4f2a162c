"""Adapters from functions in Forge's form to functions of a run."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env import Message
from ludus.proto.errors import ConfigError

RewardTerm = Callable[..., Awaitable[list[float | None]]]
GroupFunction = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Functions:
    """Functions that replace parts of a run; None keeps the default."""

    reward: Any = None
    compute_advantages: Any = None
    render: Callable[..., Any] | None = None
    parse: Callable[..., Any] | None = None

    @property
    def environment_fields(self) -> dict[str, Any]:
        """Fields of an environment's section."""
        rewards = None if self.reward is None else [{"function": make_reward_term(self.reward)}]
        fields = {"rewards": rewards, "render": self.render, "parse": self.parse}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def algorithm_fields(self) -> dict[str, Any]:
        """Fields of section `algorithm`; the fields they replace get neutral values."""
        if self.compute_advantages is None:
            return {}
        neutral = {"baseline": "mean", "scale": "none", "credit": "episode"}
        return {"advantages": make_group_function(self.compute_advantages), **neutral}


NO_FUNCTIONS = Functions()


def make_reward_term(reward: Any) -> RewardTerm:
    """Return a reward term that calls `evaluate_response(prompt, response, game_reward)`.

    Args:
        reward: the function, or a class or an object that has it as a method.

    Raises:
        ConfigError: `reward` is not such a function.
    """
    evaluate = _method(reward, "evaluate_response")
    _check_call(evaluate, "reward", prompt="", response="", game_reward=0.0)

    async def evaluate_response(
        prompts: Sequence[list[Message]],
        completions: Sequence[list[Message]],
        episode_return: Sequence[float],
    ) -> list[float | None]:
        """Compute each episode's reward from its first prompt, last response and return."""
        results = [
            evaluate(prompt=_text(prompt), response=_last_response(messages), game_reward=value)
            for prompt, messages, value in zip(prompts, completions, episode_return, strict=True)
        ]
        rewards = [await result if inspect.isawaitable(result) else result for result in results]
        return [None if reward is None else float(reward) for reward in rewards]

    return evaluate_response


def make_group_function(compute_advantages: Any) -> GroupFunction:
    """Return a function of a group that calls `compute(group)`.

    Args:
        compute_advantages: the function, or a class or an object that has it as a method.

    Raises:
        ConfigError: `compute_advantages` is not such a function.
    """
    compute = _method(compute_advantages, "compute")
    _check_call(compute, "compute_advantages", [])

    def compute_group(group: Sequence[Any]) -> Any:
        return compute(group)

    return compute_group


def _method(owner: Any, name: str) -> Callable[..., Any]:
    owner = owner() if inspect.isclass(owner) else owner
    method: Callable[..., Any] = getattr(owner, name, owner)
    return method


def _check_call(function: Any, field: str, *args: Any, **kwargs: Any) -> None:
    """Check that the function can be called with these arguments."""
    parameters = ", ".join(kwargs) or "group"
    if not callable(function):
        raise ConfigError(
            f"{field} must be a function of ({parameters}), or an object with such a method, got "
            f"{function!r:.60}"
        )
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:
        return  # some builtins have no signature
    except TypeError as error:
        raise ConfigError(
            f"{field} must be a function of ({parameters}), but cannot be called with them: "
            f"{error}; rename its parameters"
        ) from None


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _last_response(messages: Sequence[Message]) -> str:
    return next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
