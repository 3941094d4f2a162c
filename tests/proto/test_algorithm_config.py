"""Tests of algorithm settings: error messages, valid combinations and defaults."""

from __future__ import annotations

import pytest

from ludus.proto.config import LanguageModelRun, ModelCritic, PpoConfig, load_run_config
from ludus.proto.errors import ConfigError

NO_CORRECTION = "algorithm.correction.kind=off"
ROLLOUT_LOGPROBS = "algorithm.old_logprobs=rollout"


def load_algorithm(*overrides: str) -> LanguageModelRun:
    return load_run_config(None, [f"algorithm.{text}" for text in overrides])


@pytest.mark.parametrize(
    ("overrides", "message_parts"),
    [
        (
            ["loss.kind=cispo", "old_logprobs=rollout"],
            ["old_logprobs = 'rollout'", "correction.kind = 'token_tis'", "twice", "'off'"],
        ),
        (
            ["old_logprobs=rollout", "correction.kind=sequence_mask"],
            ["correction.kind = 'sequence_mask'", "twice"],
        ),
        (
            ["loss.kind=gspo"],
            ["loss.kind = 'gspo'", "aggregation = 'token_mean'", "'sequence_mean'"],
        ),
        (["kl_placement=reward"], ["kl_placement = 'reward'", "kl_coef = 0", "set kl_coef"]),
        (
            ["kl_placement=reward", "kl_coef=0.1"],
            ["kl_estimator = 'k3' in the reward", "set kl_estimator = 'k1'"],
        ),
        (
            ["kl_estimator=k1", "kl_coef=0.1"],
            ["kl_estimator = 'k1' in the loss", "kl_placement = 'reward'"],
        ),
        (["kl_coef_final=0.1"], ["kl_coef_final = 0.1", "kl_coef = 0", "above 0"]),
        (["gamma=0.9"], ["gamma = 0.9", "credit = 'episode'", "set credit = 'turn'"]),
        (["baseline=none", "scale=group"], ["scale = 'group'", "baseline = 'none'"]),
        (
            ["baseline=none"],
            ["zero_variance_groups = 'replace'", "set zero_variance_groups = 'keep'"],
        ),
        (["geometric_mask=[1.2, 2]"], ["low < 1 < high", "[1.2, 2.0]", "[0.5, 2.0]"]),
        (["geometric_mask=[2, 0.5]"], ["low < 1 < high", "[2.0, 0.5]"]),
        (["correction.cap=0.5"], ["algorithm.correction.cap", "greater than or equal to 1", "0.5"]),
        (
            ["correction.kind=icepop", "correction.low=1.5"],
            ["algorithm.correction.low", "less than 1", "1.5"],
        ),
        (
            ["correction.kind=icepop", "correction.high=0.9"],
            ["algorithm.correction.high", "greater than 1", "0.9"],
        ),
        (["loss.clip_low=1.5"], ["algorithm.loss.clip_low", "less than or equal to 1", "1.5"]),
        (["loss.clip_low=0"], ["algorithm.loss.clip_low", "greater than 0"]),
        (["loss.dual_clip=1"], ["algorithm.loss.dual_clip", "greater than 1"]),
        (["loss.kind=gspo", "loss.dual_clip=3"], ["algorithm.loss.dual_clip", "unknown key"]),
        (["kl_coef=-1"], ["algorithm.kl_coef", "-1"]),
        (["kl_coef=Infinity"], ["algorithm.kl_coef", "finite", "inf"]),
        (["entropy_coef=NaN"], ["algorithm.entropy_coef", "nan"]),
        (["anneal_fraction=0"], ["algorithm.anneal_fraction", "greater than 0"]),
        (["kind=ppo", "lam=1.5"], ["algorithm.lam", "1.5"]),
        (["kind=ppo", "gamma=0"], ["algorithm.gamma", "greater than 0"]),
        (["kind=ppo", "value_coef=0"], ["algorithm.value_coef", "greater than 0"]),
        (["kind=ppo", "baseline=mean"], ["algorithm.baseline", "unknown key"]),
        (["kind=reinforce", "baseline=leave_one_out"], ["algorithm.baseline", "'leave_one_out'"]),
        (
            ["kind=reinforce", "lam=0.9"],
            ["algorithm.lam", "unknown key", "set algorithm.kind = 'ppo'"],
        ),
        (["kind=dqn"], ["algorithm.kind", "'grpo', 'reinforce', 'ppo'", "'dqn'"]),
    ],
)
def test_invalid_algorithm_error_contains_field_value_and_remedy(
    overrides: list[str], message_parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as exc_info:
        load_algorithm(*overrides)
    for message_part in message_parts:
        assert message_part in str(exc_info.value)


@pytest.mark.parametrize(
    ("overrides", "compared_setting"),
    [
        ([], "correction.kind = 'token_tis'"),
        ([NO_CORRECTION], "geometric_mask = [0.5, 2.0]"),
        ([NO_CORRECTION, ROLLOUT_LOGPROBS], "old_logprobs = 'rollout'"),
    ],
)
def test_cut_off_distribution_is_not_compared_with_the_learner(
    overrides: list[str], compared_setting: str
) -> None:
    with pytest.raises(ConfigError) as exc_info:
        load_run_config(None, ["rollout.top_p=0.9", *overrides])
    assert "rollout.top_p = 0.9 samples from a cut-off distribution" in str(exc_info.value)
    assert f"algorithm.{compared_setting}" in str(exc_info.value)


@pytest.mark.parametrize(
    ("setting", "effect"),
    [("top_k=5", "cut-off"), ("min_p=0.1", "cut-off"), ("repetition_penalty=1.2", "changed")],
)
def test_changed_distribution_is_not_compared_with_the_learner(setting: str, effect: str) -> None:
    with pytest.raises(ConfigError) as exc_info:
        load_run_config(None, [f"rollout.{setting}"])
    field, _, value = setting.partition("=")
    assert f"rollout.{field} = {value} samples from a {effect} distribution" in str(exc_info.value)


def test_cut_off_distribution_is_accepted_without_a_comparison() -> None:
    run = load_run_config(
        None, ["rollout.top_p=0.9", NO_CORRECTION, "algorithm.geometric_mask=null"]
    )
    assert run.algorithm.sampler_comparison is None


def test_only_ppo_has_a_critic() -> None:
    run = load_run_config(None, ["algorithm.kind=ppo", "algorithm.critic.kind=model"])
    assert isinstance(run.algorithm, PpoConfig)
    assert run.algorithm.critic == ModelCritic()
    with pytest.raises(ConfigError, match=r"algorithm\.critic: unknown key"):
        load_run_config(None, ["algorithm.critic.kind=model"])
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.path: unknown key"):
        load_run_config(None, ["algorithm.kind=ppo", "algorithm.critic.path=runs/critic"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.kind=gspo", "aggregation=sequence_mean", "correction.kind=sequence_tis"],
        ["loss.kind=cispo", "old_logprobs=rollout", "correction.kind=off"],
        ["scale=none", "aggregation=constant"],
        ["baseline=leave_one_out", "credit=turn", "gamma=0.9"],
        ["baseline=none", "zero_variance_groups=keep"],
        ["kind=reinforce", "kl_placement=reward", "kl_coef=0.01", "kl_estimator=k1"],
        ["kind=ppo", "gamma=0.99", "lam=0.95", "value_clip=null"],
        ["correction.kind=icepop", "correction.low=0.1"],
    ],
)
def test_common_algorithms_are_accepted(overrides: list[str]) -> None:
    load_algorithm(*overrides)


def test_only_group_baselines_replace_zero_variance_groups_by_default() -> None:
    treatments = {
        kind: load_algorithm(f"kind={kind}").algorithm.zero_variance_groups
        for kind in ("reinforce", "ppo")
    }
    assert treatments == {"reinforce": "keep", "ppo": "keep"}
    assert load_algorithm().algorithm.zero_variance_groups == "replace"
