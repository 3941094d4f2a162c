"""Tests of user-defined policy losses, `algorithm.loss = {kind = "function"}`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from ludus.proto.config import ClipLoss, FunctionLoss, GrpoConfig, TokenTis
from ludus.proto.errors import ConfigError
from ludus.trainer.core.functions import get_or_register_path
from ludus.trainer.driver.checks import check_importable_names
from ludus.trainer.driver.trainer import Trainer
from tests.algorithms.test_policy_loss import compute_gradient, compute_terms

if TYPE_CHECKING:
    from conftest import RaggedBatch


def clip_ratio(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    clipped_ratio = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantages, clipped_ratio * advantages)


def average_logprobs(logprobs: Tensor, *_: Tensor) -> Tensor:
    return logprobs.mean()


def detach_losses(logprobs: Tensor, *_: Tensor) -> Tensor:
    return logprobs.detach()


def return_number(*_: Tensor) -> float:
    return 0.5


def raise_error(*_: Tensor) -> Tensor:
    raise KeyError("weights")


def make_config(loss: Any) -> GrpoConfig:
    return GrpoConfig(loss=loss, correction=TokenTis(), kl_coef=0.1, entropy_coef=0.01)


def make_function_config(name: str) -> GrpoConfig:
    return make_config(FunctionLoss(function=f"{__name__}:{name}"))


def test_function_loss_equals_the_equivalent_built_in_loss(ragged_batch: RaggedBatch) -> None:
    clip_config = make_config(ClipLoss(clip_low=0.2, clip_high=0.2, dual_clip=None))
    function_config = make_function_config("clip_ratio")
    assert compute_terms(ragged_batch, function_config).loss.item() == pytest.approx(
        compute_terms(ragged_batch, clip_config).loss.item()
    )
    one_part, parts = [[0, 1, 2, 3]], [[0], [1, 2], [3]]
    expected = compute_gradient(ragged_batch, clip_config, one_part)
    assert expected.abs().max() > 0.01
    assert torch.allclose(
        compute_gradient(ragged_batch, function_config, parts), expected, atol=1e-9
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("average_logprobs", r"must return a tensor of shape \[4, 4\], got a tensor of shape \[\]"),
        ("return_number", "got 0.5; return the loss of each token"),
        ("detach_losses", "do not depend on logprobs"),
        ("raise_error", "raised KeyError: 'weights'"),
    ],
)
def test_function_with_an_invalid_result_is_refused(
    ragged_batch: RaggedBatch, function: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error_info:
        compute_gradient(ragged_batch, make_function_config(function), [[0, 1, 2, 3]])
    assert f"algorithm.loss.function = '{__name__}:{function}'" in str(error_info.value)


def test_unimportable_function_is_refused() -> None:
    loss = {"kind": "function", "function": "nowhere:loss"}
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.function = 'nowhere:loss'"):
        check_importable_names(Trainer({"algorithm": {"loss": loss}}).run)


def test_configuration_accepts_a_function_object() -> None:
    def negate_logprobs(logprobs: Tensor, *_: Tensor) -> Tensor:
        return -logprobs

    run_config = Trainer(
        {"algorithm": {"loss": {"kind": "function", "function": negate_logprobs}}}
    ).run
    assert run_config.algorithm.loss == FunctionLoss(function=get_or_register_path(negate_logprobs))
