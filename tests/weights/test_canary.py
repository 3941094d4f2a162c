"""The canary detects workers that do not sample from the published weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ludus.proto.config import CanaryConfig
from ludus.proto.errors import CanaryError
from ludus.trainer.core.types import WeightManifest
from ludus.trainer.weights.canary import CanaryJudge, CanaryReport, check_canary
from ludus.trainer.weights.payload import cast_floats, make_manifest
from tests.rollout.engine_pair import (
    CANARY_PROMPT,
    EngineKind,
    EnginePair,
    add_noise,
    compute_logprobs,
    open_pair,
)

LOGPROBS = [-1.5, -0.25, -4.0]
BFLOAT16 = "bfloat16"
EMBEDDINGS = "model.embed_tokens.weight"


def make_canary_manifest(
    state: dict[str, torch.Tensor], logprobs: Sequence[float]
) -> WeightManifest:
    return make_manifest(8, state, [CANARY_PROMPT], [list(logprobs)])


def compare(
    answer: Sequence[float], dtype: str = "float32", **settings: float | None
) -> CanaryReport:
    manifest = make_canary_manifest({"w": torch.ones(2)}, LOGPROBS)
    return check_canary(manifest, [answer], CanaryConfig.model_validate(settings), dtype)


def report(error: float, *, is_exact: bool = False) -> CanaryReport:
    return CanaryReport(8, "ab" * 16, error, is_exact)


def is_accepted(judge: CanaryJudge, canary_report: CanaryReport) -> bool:
    try:
        judge.check(canary_report, worker=0)
    except CanaryError:
        return False
    return True


def shift_logprobs(*errors: float) -> list[float]:
    return [logprob - error for logprob, error in zip(LOGPROBS, errors, strict=True)]


def test_equal_logprobs_pass() -> None:
    equal = compare(LOGPROBS)
    assert (equal.error, equal.version) == (0.0, 8)
    assert is_accepted(CanaryJudge(CanaryConfig()), equal)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_float32_tolerance_applies_to_every_token(position: int) -> None:
    judge = CanaryJudge(CanaryConfig())
    for scale, may_pass in ((0.9e-4, True), (1.1e-4, False)):
        errors = [0.0, 0.0, 0.0]
        errors[position] = scale
        canary_report = compare(shift_logprobs(*errors))
        assert canary_report.error == pytest.approx(scale)
        assert is_accepted(judge, canary_report) is may_pass


def test_float32_tolerance_does_not_grow() -> None:
    judge = CanaryJudge(CanaryConfig())
    for _ in range(100):
        judge.check(report(0.9e-4, is_exact=True), worker=0)
    assert judge.compute_max_error(report(0.0, is_exact=True)) == 1e-4


@pytest.mark.parametrize(
    ("rounding_error", "max_error"),
    [(0.0, 1e-4), (1e-5, 1e-4), (3e-4, 12e-4), (1.0, 1e-2), (math.nan, 1e-4)],
)
def test_float32_tolerance_follows_the_rounding_error(
    rounding_error: float, max_error: float
) -> None:
    exact = CanaryReport(8, "ab" * 16, 0.0, is_exact=True, rounding_error=rounding_error)
    judge = CanaryJudge(CanaryConfig())
    assert judge.compute_max_error(exact) == pytest.approx(max_error)
    assert is_accepted(judge, replace(exact, error=0.9 * max_error))
    assert not is_accepted(judge, replace(exact, error=1.1 * max_error))
    fixed = CanaryJudge(CanaryConfig(tolerance=5e-5))
    assert fixed.compute_max_error(exact) == 5e-5


def test_rounding_error_of_the_manifest_reaches_the_judge() -> None:
    state = {"w": torch.ones(2)}
    manifest = make_manifest(8, state, [CANARY_PROMPT], [LOGPROBS], rounding_error=2e-4)
    answer = shift_logprobs(5e-4, 0.0, 0.0)
    canary_report = check_canary(manifest, [answer], CanaryConfig(), "float32")
    assert is_accepted(CanaryJudge(CanaryConfig()), canary_report)
    assert not is_accepted(CanaryJudge(CanaryConfig()), compare(answer))


def test_bfloat16_compares_the_mean_error() -> None:
    canary_report = compare(shift_logprobs(0.32, 0.01, 0.03), BFLOAT16)
    assert canary_report.error == pytest.approx(0.12)
    assert is_accepted(CanaryJudge(CanaryConfig()), canary_report)


@pytest.mark.parametrize(
    ("quantile", "error"), [(0.01, 0.01), (0.34, 0.03), (0.5, 0.03), (0.67, 0.32), (1.0, 0.32)]
)
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
def test_configured_quantile_of_the_errors_is_compared(
    quantile: float, error: float, dtype: str
) -> None:
    answer = shift_logprobs(0.32, 0.01, 0.03)
    assert compare(answer, dtype, quantile=quantile).error == pytest.approx(error)


def test_different_weights_never_pass_in_bfloat16() -> None:
    judge = CanaryJudge(CanaryConfig())
    assert not is_accepted(judge, report(0.6)), "without earlier reports"
    for _ in range(10):
        judge.check(report(0.3), worker=0)
    assert not is_accepted(judge, report(0.6)), "with large earlier errors"


def test_error_far_above_the_recent_median_does_not_pass() -> None:
    judge = CanaryJudge(CanaryConfig(floor=0.05, factor=4.0, window=8))
    for error in (0.02, 0.03, 0.025, 0.02, 0.04):
        assert is_accepted(judge, report(error)), "errors below the floor pass"
    assert judge.compute_max_error(report(0.0)) == pytest.approx(0.1), "4 times the median of 0.025"
    assert is_accepted(judge, report(0.09))
    assert not is_accepted(judge, report(0.2))
    for _ in range(8):
        judge.check(report(0.09), worker=0)
    assert is_accepted(judge, report(0.2)), "the window contains the latest errors only"


def test_failed_reports_do_not_raise_the_allowed_error() -> None:
    judge = CanaryJudge(CanaryConfig())
    judge.check(report(0.02), worker=0)
    assert not any(is_accepted(judge, report(0.3)) for _ in range(100))


def test_only_the_tolerance_applies_without_a_window() -> None:
    judge = CanaryJudge(CanaryConfig(window=0, tolerance=0.2))
    judge.check(report(0.001), worker=0)
    assert is_accepted(judge, report(0.19))
    assert not is_accepted(judge, report(0.21))


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
def test_nonfinite_logprob_never_passes(position: int, value: float, dtype: str) -> None:
    answer = list(LOGPROBS)
    answer[position] = value
    assert not is_accepted(CanaryJudge(CanaryConfig()), compare(answer, dtype))
    lenient = CanaryJudge(CanaryConfig(tolerance=1e9))
    assert not is_accepted(lenient, compare(answer, dtype, quantile=0.1))


def test_weights_published_in_bfloat16_use_the_bfloat16_tolerance() -> None:
    state = cast_floats({"w": torch.ones(2), "count": torch.arange(3)}, BFLOAT16)
    answer, judge = shift_logprobs(0.05, 0.0, 0.0), CanaryJudge(CanaryConfig())
    coarse = check_canary(
        make_canary_manifest(state, LOGPROBS), [answer], CanaryConfig(), "float32"
    )
    assert is_accepted(judge, coarse)
    assert not is_accepted(judge, compare(answer))


def test_tokens_of_all_prompts_are_compared_together() -> None:
    prompts = [CANARY_PROMPT, CANARY_PROMPT]
    manifest = make_manifest(8, {"w": torch.ones(2)}, prompts, [[-1.0, -2.0], [-3.0]])
    canary_report = check_canary(manifest, [[-1.0, -2.0], [-3.3]], CanaryConfig(), BFLOAT16)
    assert canary_report.error == pytest.approx(0.1)


def test_logprobs_with_a_wrong_length_raise_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare(LOGPROBS[:2])


def test_error_message_contains_worker_version_hash_and_errors() -> None:
    wrong = compare([-1.5, -0.75, -4.0])
    with pytest.raises(CanaryError, match="does not sample from the published weights") as raised:
        CanaryJudge(CanaryConfig()).check(wrong, worker=3)
    for part in ("version 8", wrong.content_hash[:12], "worker 3", "by 0.5", "allowed 0.0001"):
        assert part in str(raised.value)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stale_tied_embeddings_are_detected(tmp_path: Path) -> None:
    with open_pair(EngineKind("vllm", tie_embeddings=True), tmp_path) as pair:
        pair.sync(seed=1)
        assert measure_engine_canary(pair).error < 1e-4
        embeddings = pair.model.get_input_embeddings().weight.clone()
        add_noise(pair.model, seed=2, scale=0.05)
        pair.engine.load_weights({**dict(pair.model.named_parameters()), EMBEDDINGS: embeddings})
        assert measure_engine_canary(pair).error > 0.1
        pair.sync(seed=3)
        assert measure_engine_canary(pair).error < 1e-4


def measure_engine_canary(pair: EnginePair) -> CanaryReport:
    """Return the canary report of the engine for the weights of the plain model."""
    expected = compute_logprobs(pair.model, CANARY_PROMPT.prompt_ids, CANARY_PROMPT.completion_ids)
    state = {name: tensor.detach() for name, tensor in pair.model.named_parameters()}
    answers = [pair.engine.score(CANARY_PROMPT)]
    return check_canary(make_canary_manifest(state, expected), answers, CanaryConfig(), "float32")
