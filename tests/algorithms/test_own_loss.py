"""`algorithm.loss = {kind = "function"}`: a policy loss of the run's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from ludus.proto.config import ClipLoss, FunctionLoss, GrpoConfig, TokenTis
from ludus.proto.errors import ConfigError
from ludus.trainer.checks.names import check_names
from ludus.trainer.core.functions import function_path
from ludus.trainer.driver.trainer import Trainer
from tests.algorithms.test_policy_loss import gradient, run

if TYPE_CHECKING:
    from conftest import RaggedBatch


def clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    held = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantages, held * advantages)


def mean_of_all(logprobs: Tensor, *_: Tensor) -> Tensor:
    return logprobs.mean()


def detached(logprobs: Tensor, *_: Tensor) -> Tensor:
    return logprobs.detach()


def no_tensor(*_: Tensor) -> float:
    return 0.5


def fails(*_: Tensor) -> Tensor:
    raise KeyError("weights")


def with_loss(loss: Any) -> GrpoConfig:
    return GrpoConfig(loss=loss, correction=TokenTis(), kl_coef=0.1, entropy_coef=0.01)


def own(name: str) -> GrpoConfig:
    return with_loss(FunctionLoss(function=f"{__name__}:{name}"))


def test_it_is_trained_on_as_the_same_loss_of_ours(ragged: RaggedBatch) -> None:
    ours = with_loss(ClipLoss(clip_low=0.2, clip_high=0.2, dual_clip=None))
    theirs = own("clipped")
    assert run(ragged, theirs).loss.item() == pytest.approx(run(ragged, ours).loss.item())
    whole, parts = [[0, 1, 2, 3]], [[0], [1, 2], [3]]
    wanted = gradient(ragged, ours, whole)
    assert wanted.abs().max() > 0.01
    assert torch.allclose(gradient(ragged, theirs, parts), wanted, atol=1e-9)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("mean_of_all", r"must return a tensor of shape \[4, 4\], got a tensor of shape \[\]"),
        ("no_tensor", "got 0.5; return the loss of each token"),
        ("detached", "do not depend on logprobs"),
        ("fails", "raised KeyError: 'weights'"),
    ],
)
def test_one_that_fails_is_named(ragged: RaggedBatch, function: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as failed:
        gradient(ragged, own(function), [[0, 1, 2, 3]])
    assert f"algorithm.loss.function = '{__name__}:{function}'" in str(failed.value)


def test_one_that_cannot_be_imported_is_refused_before_anything_starts() -> None:
    loss = {"kind": "function", "function": "nowhere:loss"}
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.function = 'nowhere:loss'"):
        check_names(Trainer({"algorithm": {"loss": loss}}).run)


def test_a_dictionary_may_hold_the_function_itself() -> None:
    def mine(logprobs: Tensor, *_: Tensor) -> Tensor:
        return -logprobs

    run_config = Trainer({"algorithm": {"loss": {"kind": "function", "function": mine}}}).run
    assert run_config.algorithm.loss == FunctionLoss(function=function_path(mine))
