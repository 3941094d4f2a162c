"""The policy loss by a function of the run's own, `algorithm.loss = {kind = "function"}`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ludus.proto.errors import ConfigError
from ludus.trainer.core.functions import import_object

OWN_LOSS = "algorithm.loss.function"


def own_loss(
    path: str, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """[N, T] losses of tokens, as the function named `path` says; its gradient is trained on.

    Args:
        logprobs: [N, T], of the policy that is trained; the only one with a gradient.
        old_logprobs: [N, T], of the same policy when the step began.
        advantages: [N, T] or [N, 1]; the function gets [N, T].
        mask: bool [N, T], True = sampled by the policy. Elsewhere all the others are 0, and what
            the function returns there is not read.

    Raises:
        ConfigError: the function fails, or returns no [N, T] with a gradient.
    """
    function = import_object(path, OWN_LOSS)
    try:
        said: Any = function(logprobs, old_logprobs, advantages.expand_as(mask), mask)
    except Exception as error:  # the boundary to the run's own function
        raise ConfigError(
            f"{OWN_LOSS} = '{path}' raised {type(error).__name__}: {error}; expected a function of "
            "logprobs, old_logprobs, advantages and mask that returns the loss of each token"
        ) from error
    if not isinstance(said, Tensor) or said.shape != mask.shape:
        got = f"one of {list(said.shape)}" if isinstance(said, Tensor) else f"{said!r:.100}"
        raise ConfigError(
            f"{OWN_LOSS} = '{path}' expected to return a tensor of {list(mask.shape)}, got {got}; "
            "return the loss of each token, and no mean of them"
        )
    if logprobs.requires_grad and not said.requires_grad:
        raise ConfigError(
            f"{OWN_LOSS} = '{path}' returned losses that do not depend on logprobs, so nothing "
            "would be learned; do not detach them"
        )
    return said
