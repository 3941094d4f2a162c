from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.trainer.algorithms.losses import entropy, token_logprobs


@given(st.integers(0, 2**31), st.floats(0.1, 3))
def test_token_logprobs_equal_log_softmax_with_temperature(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (2, 3), generator=generator)
    rows = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(
        token_logprobs(logits, targets, temperature), rows.gather(-1, targets[..., None])[..., 0]
    )


def test_token_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([[3.0, 1.0, -2.0]], dtype=torch.bfloat16)
    logprob = token_logprobs(logits, torch.tensor([1]))
    assert logprob.dtype == torch.float32
    torch.testing.assert_close(logprob, logits.float().log_softmax(-1)[:, 1])


def test_entropy_of_uniform_and_deterministic_distributions_is_exact() -> None:
    uniform_logits, certain_logits = torch.zeros(8), torch.tensor([1e4, 0.0, -1e4])
    assert math.isclose(entropy(uniform_logits.log_softmax(-1)).item(), math.log(8), rel_tol=1e-6)
    assert entropy(certain_logits.log_softmax(-1)).item() == 0.0


@given(st.floats(-1e4, 1e4))
def test_entropy_is_invariant_to_a_constant_logit_shift(shift: float) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    actual, expected = (entropy(row.log_softmax(-1)) for row in (logits + shift, logits))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_token_with_zero_probability_does_not_affect_entropy_or_gradient() -> None:
    logits = torch.tensor([0.3, -torch.inf, -0.7], requires_grad=True)
    allowed_logits = torch.tensor([0.3, -0.7], requires_grad=True)
    actual, expected = (entropy(row.log_softmax(-1)) for row in (logits, allowed_logits))
    actual.backward()
    expected.backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(logits.grad[[0, 2]], allowed_logits.grad)
    assert logits.grad[1] == 0
