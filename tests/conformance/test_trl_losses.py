"""Losses and gradients equal those that TRL's GRPOTrainer computes from the same log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from upstream_environment import build_virtual_environment

from tests.conformance.parties import TRL_PACKAGES, UPSTREAM_FOLDER
from tests.conformance.test_trl import run_and_parse
from tests.numerics.loss_cases import LOSS_TYPES, LossCase, compute_weights, make_case
from tests.numerics.test_losses import NUM_CASES, TOLERANCES, assert_near, compute_in_one_share

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def python() -> Path:
    """Return an interpreter with TRL."""
    return build_virtual_environment("upstream-trl-1.16.0+openenv-0.10.0", TRL_PACKAGES)


def describe_case(case: LossCase, loss_type: str) -> dict[str, Any]:
    """Return the case as JSON, without rows of padding, which TRL counts as sequences."""
    rows = [row for row, length in enumerate(case.lengths) if length]
    weights = torch.ones_like(case.logprobs)
    for row in rows:
        length = case.lengths[row]
        differences = case.old_logprobs[row, :length] - case.rollout_logprobs[row, :length]
        weights[row, :length] = torch.tensor(
            compute_weights(case, [float(value) for value in differences]), dtype=weights.dtype
        )
    return {
        "dtype": str(case.logprobs.dtype).removeprefix("torch."),
        "loss_type": loss_type,
        "weights": weights[rows].tolist(),
        "mask": case.mask[rows].int().tolist(),
        "advantages": case.advantages[rows].flatten().tolist(),
        **{
            name: getattr(case, name)[rows].nan_to_num().tolist()
            for name in ("logprobs", "old_logprobs", "ref_logprobs")
        },
        **{
            name: getattr(case, name)
            for name in ("clip_low", "clip_high", "dual_clip", "kl_coef", "max_tokens")
        },
    }


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])
def test_losses_equal_those_of_trl(python: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    # bnpo differs from dapo between micro-batches only.
    names = {**{name: name for name in LOSS_TYPES}, "bnpo": "dapo"}
    cases = [
        (trl_name, make_case(seed, name, dtype))
        for trl_name, name in names.items()
        for seed in range(NUM_CASES)
    ]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([describe_case(case, name) for name, case in cases]))
    results = run_and_parse([python, "-I", UPSTREAM_FOLDER / "trl_losses.py", file])
    for (_, case), (expected_loss, expected_gradient) in zip(cases, results, strict=True):
        logprobs = case.logprobs.clone().requires_grad_()
        loss = compute_in_one_share(case, logprobs)
        loss.backward()
        assert logprobs.grad is not None
        rows = [row for row, length in enumerate(case.lengths) if length]
        assert_near(
            loss.detach(), torch.tensor(expected_loss, dtype=torch.float64), TOLERANCES[dtype]
        )
        expected = torch.tensor(expected_gradient, dtype=torch.float64)
        assert_near(logprobs.grad[rows], expected, TOLERANCES[dtype])
