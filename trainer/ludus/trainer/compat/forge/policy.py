"""`trainer.policy`: completions of the policy in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.data_models.completion import Completion
from ludus.trainer.driver.policy import Policy

SAMPLING_PARAMETERS = {"n": "num", "temperature": "temperature", "max_tokens": "max_tokens"} | {
    "top_p": "top_p",
    "seed": "seed",
}
"""Names of vLLM's sampling parameters and of their Ludus counterparts."""


class ForgePolicy:
    """The policy with the weights of the rollout workers."""

    def __init__(self, policy: Policy) -> None:
        self.generate = Generation(policy)


class Generation:
    """`policy.generate(...)`, and Forge's `policy.generate.route(...)`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def __call__(
        self,
        prompt: str | Sequence[Message],
        *,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Return completions of a user message or of a conversation.

        Args:
            sampling_params: n, temperature, top_p, max_tokens and seed. Default: the settings of
                rollouts, and one completion.

        Raises:
            ConfigError: a parameter is unknown, or the prompt leaves no room for a completion.
        """
        return await self._complete(self._policy.prompt_ids(prompt), sampling_params)

    async def route(
        self, prompt: str, *, sampling_params: Mapping[str, Any] | None = None
    ) -> list[Completion]:
        """Return completions of a text to which the chat template has already been applied."""
        return await self._complete(self._policy.chat.encode(prompt), sampling_params)

    async def _complete(
        self, prompt_ids: list[int], sampling_params: Mapping[str, Any] | None
    ) -> list[Completion]:
        options = translate_sampling_params(sampling_params or {})
        completions = await self._policy.complete(prompt_ids, **options)
        text = self._policy.chat.decode_prompt(prompt_ids)
        return [Completion.convert(completion, text) for completion in completions]


def translate_sampling_params(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with Ludus' names.

    Raises:
        ConfigError: a parameter is unknown.
    """
    unknown_names = sorted(sampling_params.keys() - SAMPLING_PARAMETERS.keys())
    if unknown_names:
        raise ConfigError(
            f"sampling_params does not support {', '.join(unknown_names)}; the supported "
            f"parameters are {', '.join(SAMPLING_PARAMETERS)}"
        )
    return {SAMPLING_PARAMETERS[name]: value for name, value in sampling_params.items()}
