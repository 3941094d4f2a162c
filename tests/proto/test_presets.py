"""Tests of presets: default values, and run settings that override them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ludus.proto.config import (
    ClipLoss,
    GrpoConfig,
    LanguageModelRun,
    NoCorrection,
    PpoConfig,
    SequenceMask,
    load_run_config,
)
from ludus.proto.config.presets import PRESETS
from ludus.proto.errors import ConfigError


def load_preset(preset: str, *overrides: str) -> LanguageModelRun:
    return load_run_config(None, [f"preset={preset}", *overrides])


def test_torchforge_preset_has_the_settings_of_torchforge() -> None:
    run = load_preset("torchforge")
    assert run.algorithm == GrpoConfig(
        baseline="mean",
        scale="group",
        zero_variance_groups="keep",
        loss=ClipLoss(clip_low=0.2, clip_high=0.2, dual_clip=None),
        correction=NoCorrection(),
        geometric_mask=None,
        aggregation="sequence_mean",
        kl_coef=0.1,
        kl_estimator="k3",
    )
    rollout, learner, training = run.rollout, run.learner, run.training
    assert (rollout.group_size, rollout.group_seed) == (4, "independent")
    assert (rollout.max_completion_tokens, rollout.max_turns) == (32, 10)
    assert (learner.learning_rate, learner.eps, learner.warmup_steps) == (1e-5, 1e-8, 1)
    assert (learner.max_grad_norm, learner.dtype) == (1.0, "bfloat16")
    assert run.training.groups_per_step * run.rollout.group_size == 8
    assert (training.num_steps, training.max_staleness) == (1000, 1)
    assert training.checkpoint_every_steps == 500


def test_trl_preset_has_the_settings_of_trl() -> None:
    run = load_preset("trl")
    assert run.algorithm == GrpoConfig(
        scale="group",
        zero_variance_groups="keep",
        loss=ClipLoss(clip_low=0.2, clip_high=0.2, dual_clip=None),
        correction=SequenceMask(cap=3.0),
        geometric_mask=None,
        aggregation="token_mean",
        kl_coef=0.0,
    )
    assert (run.rollout.group_size, run.rollout.max_completion_tokens) == (8, 256)
    learner = run.learner
    assert (learner.learning_rate, learner.schedule, learner.warmup_steps) == (1e-6, "linear", 0)
    assert (learner.betas, learner.weight_decay) == ((0.9, 0.999), 0.0)
    assert (run.training.groups_per_step, run.training.max_staleness) == (1, 0)


def test_dapo_preset_has_the_settings_of_dapo() -> None:
    run = load_preset("dapo")
    assert run.algorithm == GrpoConfig(
        scale="group",
        zero_variance_groups="replace",
        max_group_batches=10,
        loss=ClipLoss(clip_low=0.2, clip_high=0.28, dual_clip=None),
        correction=NoCorrection(),
        geometric_mask=None,
        aggregation="token_mean",
        kl_coef=0.0,
    )
    learner = run.learner
    assert (learner.learning_rate, learner.schedule, learner.warmup_steps) == (1e-6, "constant", 20)
    assert (learner.weight_decay, learner.max_grad_norm) == (0.1, 1.0)
    # 16 updates of 512 episodes each.
    assert run.training.groups_per_step * run.rollout.group_size == 8192
    assert learner.num_minibatches == 16


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_run_fields_override_the_preset(tmp_path: Path, preset: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        preset = "{preset}"
        [rollout]
        group_size = 6
        [algorithm]
        kl_coef = 0.03
        [algorithm.loss]
        clip_high = 0.5
        [learner]
        learning_rate = 3e-4
        """
    )
    run = load_run_config(path, ["training.max_staleness=3"])
    preset_run = load_preset(preset)
    assert (run.rollout.group_size, run.training.max_staleness) == (6, 3)
    assert (run.learner.learning_rate, run.algorithm.kl_coef) == (3e-4, 0.03)
    assert run.algorithm.loss == ClipLoss(clip_low=0.2, clip_high=0.5, dual_clip=None)
    assert run.learner.betas == preset_run.learner.betas
    assert run.algorithm.aggregation == preset_run.algorithm.aggregation


def test_section_of_another_kind_replaces_the_preset_section() -> None:
    run = load_preset("trl", "algorithm.correction.kind=token_tis")
    assert run.algorithm.correction.model_dump() == {"kind": "token_tis", "cap": 2.0}
    assert run.algorithm.aggregation == "token_mean"
    assert load_preset("torchforge", "algorithm.kind=ppo").algorithm == PpoConfig()
    run = load_preset("trl", "algorithm.correction.cap=5")
    assert run.algorithm.correction == SequenceMask(cap=5.0), "the kind of the preset was lost"


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_resolved_configuration_can_be_read_again(tmp_path: Path, preset: str) -> None:
    changes = ["algorithm.loss.kind=cispo", "learner.warmup_steps=7", "algorithm.kl_coef=0"]
    for overrides in ([], changes):
        run = load_preset(preset, *overrides)
        path = tmp_path / "config.json"
        path.write_text(run.model_dump_json())
        assert load_run_config(path) == run
        assert json.loads(path.read_text())["preset"] == preset


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_field_of_a_preset_is_in_the_run(preset: str) -> None:
    run_tree = json.loads(load_preset(preset).model_dump_json())
    for section, fields in PRESETS[preset].items():
        assert run_tree[section] == {**run_tree[section], **fields}


def test_unknown_preset_error_lists_the_known_presets() -> None:
    with pytest.raises(ConfigError, match=r"preset: .*'torchforge', 'trl' or 'dapo'.*'verl'"):
        load_preset("verl")


def test_reading_does_not_change_the_preset() -> None:
    presets_json = json.dumps({name: dict(tree) for name, tree in PRESETS.items()})
    load_preset("dapo", "algorithm.loss.clip_high=0.9", "rollout.group_size=2")
    assert json.dumps({name: dict(tree) for name, tree in PRESETS.items()}) == presets_json
