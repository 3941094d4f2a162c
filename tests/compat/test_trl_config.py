"""Mapping of the fields of TRL's GRPOConfig to run settings, and errors for unsupported fields."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.config import EntropyControl, make_run_config
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl import GRPOConfig
from ludus.trainer.compat.trl.config import DEFAULTS, IGNORED_FIELDS, MAPPED_FIELDS, REFUSED_FIELDS
from ludus.trainer.compat.trl.run_settings import (
    Batches,
    find_run_folder,
    make_batches,
    make_run_settings,
)

ENVIRONMENT = {
    "rollout": "trl:m:f",
    "rewards": [{"function": "m:r"}],
    "max_sessions": 1_000_000,
}


def make_run(num_prompts: int = 64, **fields: Any) -> Any:
    """Return the run configuration for a GRPOConfig with these fields, without a GPU."""
    args = GRPOConfig("out/echo", **{"use_cpu": True, **fields})
    settings = make_run_settings(args, make_batches(args, num_prompts), 1024)
    return make_run_config(
        {
            **settings,
            "environment": ENVIRONMENT,
            "model": {"kind": "pretrained", "path": "./m"},
        },
        [],
    )


def get_value(run: Any, path: str) -> Any:
    """Return the value at a dotted path in the run configuration."""
    for name in path.split("."):
        run = getattr(run, name)
    return run


def test_every_field_is_in_exactly_one_table() -> None:
    tables = [set(MAPPED_FIELDS), set(IGNORED_FIELDS), set(REFUSED_FIELDS)]
    assert sum(map(len, tables)) == len(set.union(*tables)) == len(DEFAULTS)


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ({}, "name", "echo"),
        ({}, "output_dir", "out"),
        ({"seed": 7}, "seed", 7),
        ({}, "algorithm.scale", "group"),
        ({"scale_rewards": False}, "algorithm.scale", "none"),
        ({}, "algorithm.aggregation", "token_mean"),
        ({"loss_type": "dr_grpo"}, "algorithm.aggregation", "constant"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "algorithm.loss.clip_high", 4.0),
        ({"epsilon": 0.3}, "algorithm.loss.clip_high", 0.3),
        ({"epsilon_high": 0.28}, "algorithm.loss.clip_low", 0.2),
        ({"delta": 4.0}, "algorithm.loss.dual_clip", 4.0),
        (
            {"importance_sampling_level": "sequence", "loss_type": "grpo"},
            "algorithm.loss.kind",
            "gspo",
        ),
        ({"beta": 0.04}, "algorithm.kl_coef", 0.04),
        ({"beta": 0.04}, "algorithm.kl_estimator", "k2"),
        ({"beta": 0.1, "use_bias_correction_kl": False}, "algorithm.kl_estimator", "k3"),
        ({"entropy_coef": 0.01}, "algorithm.entropy_coef", 0.01),
        ({"entropy_target": 0.3}, "algorithm.entropy_control", None),
        (
            {"use_adaptive_entropy": True, "entropy_target": 0.3},
            "algorithm.entropy_control",
            EntropyControl(target=0.3, change=0.005, min_coef=0.0, max_coef=1.0),
        ),
        ({"use_vllm": True}, "algorithm.correction.kind", "sequence_mask"),
        ({"use_vllm": False}, "algorithm.correction.kind", "off"),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_cap": 2.0,
            },
            "algorithm.correction.cap",
            2.0,
        ),
        ({"top_k": 20, "min_p": 0.1}, "rollout.top_k", 20),
        ({"top_p": None}, "rollout.top_p", 1.0),
        ({"use_vllm": True, "top_k": 10}, "algorithm.correction.kind", "off"),
        ({"report_to": "trackio", "trackio_space_id": "me/run"}, "metrics.tensorboard", False),
        ({"repetition_penalty": 1.1}, "rollout.repetition_penalty", 1.1),
        ({"max_completion_length": 32}, "rollout.max_completion_tokens", 32),
        ({"use_vllm": True, "vllm_mode": "server"}, "rollout.generate_port", 8000),
        (
            {
                "use_vllm": True,
                "vllm_mode": "server",
                "vllm_server_base_url": "http://localhost:81",
            },
            "rollout.generate_port",
            81,
        ),
        ({}, "rollout.generate_port", None),
        ({"lr_scheduler_type": "cosine"}, "learner.schedule", "cosine"),
        ({"adam_beta2": 0.95}, "learner.betas", (0.9, 0.95)),
        ({"warmup_steps": 0.1}, "learner.warmup_steps", 20),
        # A batch has four optimizer steps, and its steps have the same learning rate.
        ({"warmup_steps": 100, "num_iterations": 4}, "learner.warmup_steps", 25),
        ({"warmup_steps": 0.1, "num_iterations": 4}, "learner.warmup_steps", 20),
        ({"bf16": True}, "learner.dtype", "bfloat16"),
        ({}, "learner.dtype", "float32"),
        ({"gradient_checkpointing": False}, "learner.activation_checkpointing", False),
        ({"save_total_limit": 3}, "training.keep_checkpoints", 3),
        ({"save_strategy": "no"}, "training.checkpoint_every_steps", 193),
        ({}, "training.max_staleness", 0),
        ({"report_to": ["tensorboard"]}, "metrics.tensorboard", True),
        ({"log_completions": True}, "metrics.transcripts_per_step", 8),
    ],
)
def test_field_is_mapped_to_a_run_setting(fields: dict[str, Any], path: str, value: Any) -> None:
    assert get_value(make_run(**fields), path) == value


@pytest.mark.parametrize(
    ("fields", "num_prompts", "expected"),
    [
        # A batch of 32 rows has 4 prompts with 8 generations each, for one optimizer step.
        (
            {"gradient_accumulation_steps": 4, "num_train_epochs": 1},
            64,
            Batches(num_groups=4, num_minibatches=1, num_steps=16, num_prompts=64),
        ),
        # Each generated batch has two optimizer steps. max_steps counts optimizer steps.
        (
            {"steps_per_generation": 2, "max_steps": 10},
            64,
            Batches(num_groups=2, num_minibatches=2, num_steps=5, num_prompts=64),
        ),
        # Two passes over each batch give four optimizer steps.
        (
            {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 20},
            64,
            Batches(num_groups=2, num_minibatches=2, num_steps=5, num_prompts=64, num_passes=2),
        ),
        # One optimizer step uses four batches that were generated with the same weights.
        (
            {
                "gradient_accumulation_steps": 4,
                "steps_per_generation": 1,
                "num_train_epochs": 1,
            },
            10,
            Batches(num_groups=4, num_minibatches=1, num_steps=2, num_prompts=10),
        ),
    ],
)
def test_trl_rows_and_epochs_become_batches(
    fields: dict[str, Any], num_prompts: int, expected: Batches
) -> None:
    assert make_batches(GRPOConfig("out", **fields), num_prompts) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_iteration": 2}, "no field 'num_iteration' in TRL 1.16; did you mean 'num_iter"),
        ({"deepspeed": "zero3.json"}, "deepspeed = 'zero3.json' .*learner.num_ranks"),
        ({"optim": "sgd"}, "optim = 'sgd' is not supported"),
        ({"loss_type": "sapo"}, "loss_type = 'sapo' must be one of dapo, grpo"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type = 'polynomial'"),
        ({"report_to": ["mlflow"]}, r"report_to = \['mlflow'\] must be 'none', 'wandb'"),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "gpu7"},
            "vllm_server_host = 'gpu7' is not supported",
        ),
        ({"num_generations": 3}, "whole groups of num_generations = 3"),
        ({"max_grad_norm": 0}, "max_grad_norm = .* must be a number above 0"),
        ({"max_grad_norm": None}, "max_grad_norm = .* must be a number above 0"),
        ({"max_completion_length": 2000}, "GRPOConfig.max_completion_length = 2000 leaves no room"),
        ({"num_prompts": 0}, "expected at least 1 prompts"),
        ({"generation_batch_size": 12}, "12 must be a multiple of per_device_train_batch_size"),
        ({"logging_steps": 0}, "logging_steps = 0 must be above 0 if logging_strat"),
        ({"save_steps": -1}, "save_steps = -1 must be above 0"),
        (
            {"loss_type": "cispo", "importance_sampling_level": "sequence"},
            "'cispo' needs importance_sampling_level = 'token' and delta = None, got 'sequence'",
        ),
        ({"loss_type": "cispo", "delta": 3.0}, "got 'token' and 3.0"),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://a:99999"},
            "vllm_server_base_url = 'http://a:99999': Port out of range",
        ),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_run(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"learning_rate": "1e-5"},
            "learning_rate = '1e-5' must be a number above 0, at most 1",
        ),
        ({"beta": float("nan")}, "beta = nan must be a number of 0 or more"),
        ({"warmup_steps": None}, "warmup_steps = None must be a whole number of 0 or more, or a "),
        (
            {"num_generations": 0},
            "num_generations = 0 must be a whole number of 2 or more",
        ),
        ({"num_iterations": 1.5}, "num_iterations = 1.5 must be a whole number of 1 or more"),
        ({"generation_batch_size": 0}, "generation_batch_size = 0 must be a whole number of 1"),
        ({"gradient_checkpointing": "no"}, "gradient_checkpointing = 'no' must be True or False"),
        ({"bf16": "yes"}, "bf16 = 'yes' must be True or False"),
        ({"loss_type": ["grpo"]}, "loss_type = .* must be one of"),
        ({"report_to": 5}, "report_to = 5 must be 'none', 'wandb'"),
        ({"reward_weights": ["a"]}, r"reward_weights = \['a'\] must be a list of numbers"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs = 5 must be a dictionary"),
        ({"output_dir": 5}, "output_dir = 5 must be a path"),
    ],
)
def test_value_of_the_wrong_type_is_refused_in_the_constructor(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**fields)
    args = GRPOConfig()
    with pytest.raises(ConfigError, match=message):
        setattr(args, *next(iter(fields.items())))


NUMBER_FIELDS = [
    name
    for name, (default, _) in MAPPED_FIELDS.items()
    if isinstance(default, (int, float)) and not isinstance(default, bool)
] + [
    name for name, (default, _) in MAPPED_FIELDS.items() if default is None and name != "output_dir"
]


@pytest.mark.parametrize("use_vllm", [False, True])
@pytest.mark.parametrize("name", NUMBER_FIELDS)
def test_error_of_an_invalid_number_contains_the_field_name(name: str, use_vllm: bool) -> None:
    is_refused = False
    for value in (-1, -0.5, 0, 1e-9, 0.5, 1, 1.5, 2, 3.5, 8, 70_000, 2**40, 1e30, True, "8"):
        try:
            make_run(10_000_000, **{"use_vllm": use_vllm, name: value})
        except ConfigError as error:
            is_refused = True
            assert "is not a valid run" not in str(error), (value, str(error))
            assert name in str(error) or "expected at least" in str(error), (value, str(error))
    assert is_refused or name == "resume_from_checkpoint"


def test_save_total_limit_of_0_or_less_disables_the_limit() -> None:
    limits = {make_run(save_total_limit=limit).training.keep_checkpoints for limit in (None, 0, -1)}
    assert len(limits) == 1
    assert limits.pop() > 1000


def test_every_default_is_accepted() -> None:
    assert vars(GRPOConfig(**{**DEFAULTS, "output_dir": "out"}))["output_dir"] == "out"


def test_last_part_of_output_dir_is_the_run_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert find_run_folder(GRPOConfig("~/out/echo")) == Path("/home/me/out/echo")
    for name in (".", "my run", "x" * 48):
        with pytest.raises(ConfigError, match=r"output_dir = .* its last part is the name of the"):
            find_run_folder(GRPOConfig(name))


def test_correction_that_cannot_be_computed_is_off_and_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(use_vllm=True, top_k=10)
    note = "note: GRPOConfig.top_k = 10 samples from a cut-off distribution"
    assert note in capsys.readouterr().err
    make_run(use_vllm=True, top_k=10, vllm_importance_sampling_correction=False)
    assert note not in capsys.readouterr().err


def test_missing_vllm_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ludus.trainer.compat.trl.run_settings.is_vllm_installed", lambda: False)
    assert make_run(use_vllm=True).generator.kind == "transformers"
    assert "note: GRPOConfig.use_vllm = True, and vLLM is not installed" in capsys.readouterr().err


def test_field_without_effect_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    args = GRPOConfig(dataloader_num_workers=4, bf16=True)
    notes = capsys.readouterr().err
    assert notes.count("\n") == 1
    assert "note: GRPOConfig.dataloader_num_workers has no effect here" in notes
    assert args.dataloader_num_workers == 4
    args.use_liger_kernel = True
    assert "GRPOConfig.use_liger_kernel has no effect here" in capsys.readouterr().err


def test_a_configuration_can_be_copied_and_pickled() -> None:
    args = GRPOConfig("out", num_generations=4)
    for copied_args in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert vars(copied_args) == vars(args)
    assert repr(args) == "GRPOConfig(output_dir='out', num_generations=4)"
    assert not hasattr(args, "warmup_ratio")
    with pytest.raises(ConfigError, match="temprature"):
        args.temprature = 1.0
