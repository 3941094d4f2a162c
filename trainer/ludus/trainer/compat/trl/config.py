"""TRL's GRPOConfig: every field of TRL 1.16, with its default.

    mapped   becomes a setting of the run (run_settings.py)
    ignored  has no effect here; reported when the field is set
    refused  is not supported; the error names a remedy

`tests/conformance/test_trl.py` compares the names and defaults with TRL's own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ludus.proto.config.section import (
    DecayRate,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Temperature,
)
from ludus.proto.errors import ConfigError, did_you_mean
from ludus.trainer.compat.checks import PathText, Penalty, Share, ShareBelow1, Text, check_value

_GroupSize = Annotated[
    int,
    Field(ge=2, description="a whole number of 2 or more, as completions of a prompt are compared"),
]
_GradNorm = Annotated[
    float, Field(gt=0, description="a number above 0 (a large one disables clipping)")
]
_Strategy = Literal["no", "steps", "epoch"]
_Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup"]
_CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
_WeightCap = Annotated[float, Field(ge=1)]
_Warmup = NonNegativeInt | Annotated[float, Field(ge=0, lt=1, description="a share below 1")]
_Report = Literal["none", "wandb", "tensorboard", "trackio"]
_Reports = Annotated[
    _Report | list[_Report] | tuple[_Report, ...],
    Field(
        description="'none', 'wandb', 'tensorboard', 'trackio' or a list of them; every run also "
        "has metrics.jsonl, a report and `ludus watch`"
    ),
]
_Numbers = Annotated[
    list[float] | tuple[float, ...], Field(description="a list of numbers, one per function")
]
_Dictionary = Annotated[dict[str, Any], Field(description="a dictionary")]

MAPPED_FIELDS: Mapping[str, tuple[Any, Any]] = {
    "output_dir": (None, PathText | None),
    "seed": (42, NonNegativeInt),
    "per_device_train_batch_size": (8, PositiveInt),
    "gradient_accumulation_steps": (1, PositiveInt),
    "generation_batch_size": (None, PositiveInt | None),
    "steps_per_generation": (None, PositiveInt | None),
    "num_generations": (8, _GroupSize),
    "num_generations_eval": (None, PositiveInt | None),
    "num_train_epochs": (3.0, PositiveFloat),
    "max_steps": (-1, Annotated[int, Field()]),
    "num_iterations": (1, PositiveInt),
    "learning_rate": (1e-6, LearningRate),
    "lr_scheduler_type": ("linear", _Schedule),
    "warmup_steps": (0, _Warmup),
    "weight_decay": (0.0, NonNegativeFloat),
    "adam_beta1": (0.9, DecayRate),
    "adam_beta2": (0.999, DecayRate),
    "adam_epsilon": (1e-8, PositiveFloat),
    "max_grad_norm": (1.0, _GradNorm),
    "bf16": (None, bool | None),
    "gradient_checkpointing": (True, bool),
    "torch_compile": (False, bool),
    "use_cpu": (False, bool),
    "logging_strategy": ("steps", _Strategy),
    "logging_steps": (10, float),
    "logging_first_step": (False, bool),
    "report_to": ("none", _Reports | None),
    "trackio_space_id": (None, Text | None),
    "eval_strategy": ("no", _Strategy),
    "eval_steps": (None, float | None),
    "save_strategy": ("steps", _Strategy),
    "save_steps": (500, float),
    "save_total_limit": (None, Annotated[int, Field()] | None),
    "data_seed": (None, NonNegativeInt | None),
    "max_completion_length": (512, PositiveInt),
    "mask_truncated_completions": (False, bool),
    "temperature": (1.0, Temperature),
    "top_p": (1.0, Share | None),
    "top_k": (0, Annotated[int, Field(ge=-1)] | None),
    "min_p": (None, ShareBelow1 | None),
    "repetition_penalty": (1.0, Penalty),
    "chat_template_kwargs": (None, _Dictionary | None),
    "use_vllm": (False, bool),
    "vllm_mode": ("colocate", Literal["server", "colocate"]),
    "vllm_server_base_url": (None, Text | None),
    "vllm_server_host": ("0.0.0.0", Text),
    "vllm_server_port": (8000, Port),
    "vllm_gpu_memory_utilization": (0.3, Share),
    "vllm_max_model_length": (None, PositiveInt | None),
    "vllm_tensor_parallel_size": (1, PositiveInt),
    "vllm_importance_sampling_correction": (True, bool),
    "vllm_importance_sampling_mode": ("sequence_mask", _CorrectionMode),
    "vllm_importance_sampling_clip_max": (3.0, _WeightCap | None),
    "vllm_importance_sampling_clip_min": (None, Annotated[float, Field(gt=0, lt=1)] | None),
    "vllm_importance_sampling_cap": (None, _WeightCap | None),
    "beta": (0.0, NonNegativeFloat),
    "use_bias_correction_kl": (True, bool),
    "epsilon": (0.2, Share),
    "epsilon_high": (None, PositiveFloat | None),
    "delta": (None, Annotated[float, Field(gt=1)] | None),
    "importance_sampling_level": ("token", Literal["token", "sequence"]),
    "reward_weights": (None, _Numbers | None),
    "scale_rewards": ("group", Literal[True, False, "group", "batch", "none"]),
    "loss_type": ("dapo", Literal["dapo", "grpo", "dr_grpo", "cispo"]),
    "entropy_coef": (0.0, NonNegativeFloat),
    "use_adaptive_entropy": (False, bool),
    "entropy_coef_min": (0.0, NonNegativeFloat),
    "entropy_coef_max": (1.0, NonNegativeFloat),
    "entropy_coef_delta": (0.005, PositiveFloat),
    "entropy_target": (0.2, PositiveFloat),
    "max_tool_calling_iterations": (None, NonNegativeInt | None),
    "log_completions": (False, bool),
    "num_completions_to_print": (None, PositiveInt | None),
    "resume_from_checkpoint": (None, Any),
}
"""Default and type of each mapped field, by its name."""

_IGNORED_BY_REASON = {
    "the schedules have no further settings": "lr_scheduler_kwargs=None",
    "the loss always uses the denominator of a step": "average_tokens_across_devices=True",
    "evaluations use the type of the rollout workers": "bf16_full_eval=False fp16_full_eval=False",
    "activations are recomputed without re-entry": "gradient_checkpointing_kwargs=None",
    "it only affects speed": "use_liger_kernel=False liger_kernel_config=None"
    " pad_to_multiple_of='auto' cache_implementation=None use_transformers_paged=False"
    " use_transformers_continuous_batching=False transformers_continuous_batching_config=None",
    "it only affects memory": "torch_empty_cache_steps=None vllm_enable_sleep_mode=False",
    "rollout workers always use a cache, the learner never does": "use_cache=False",
    "ludus watch and trainer.log show the run": "log_on_each_node=True log_level='passive'"
    " log_level_replica='warning' disable_tqdm=None debug='' log_unique_prompts=False",
    "an update that is not finite is skipped and counted": "logging_nan_inf_filter=True",
    "num_tokens_in_batch counts them": "include_num_input_tokens_seen='no'",
    "the last part of output_dir is the name of the run, except in Trackio": "run_name=None",
    "it is the project name for report_to = 'wandb' or 'trackio' only": "project='huggingface'",
    "evaluations start with the first step": "eval_delay=0",
    "episodes of an evaluation are played at the same time": "per_device_eval_batch_size=8",
    "an evaluation plays episodes and computes no loss": "prediction_loss_only=False"
    " eval_do_concat_batches=True eval_use_gather_object=False eval_accumulation_steps=None"
    " include_for_metrics=[] batch_eval_metrics=False",
    "the policy is always evaluated before the first step": "eval_on_start=False",
    "checkpoints are in the run folder": "save_on_each_node=False",
    "Ctrl-C and SIGTERM always write a checkpoint": "enable_jit_checkpoint=False",
    "a resumed run continues at its row": "ignore_data_skip=False",
    "callbacks start again when a run resumes": "restore_callback_states_from_checkpoint=False",
    "random numbers always depend on the seed only": "full_determinism=False",
    "there is no data loader, because rollout workers read the rows": "dataloader_drop_last=False"
    " dataloader_num_workers=0 dataloader_pin_memory=True dataloader_persistent_workers=False"
    " dataloader_prefetch_factor=None dataloader_multiprocessing_context=None"
    " dataloader_in_order=True length_column_name='length'",
    "learner ranks use FSDP2 (learner.num_ranks)": "accelerator_config=None local_rank=-1"
    " ddp_find_unused_parameters=None ddp_bucket_cap_mb=None ddp_broadcast_buffers=None"
    " ddp_static_graph=None ddp_backend=None ddp_timeout=1800",
    "metrics.jsonl contains the measurements": "skip_memory_metrics=True",
    "train() trains": "do_train=False do_predict=False",
    "eval_strategy sets when the policy is evaluated": "do_eval=False",
    "float32 products use the settings of torch": "tf32=None",
    "dropout is always disabled": "disable_dropout=False",
    "there is no DeepSpeed": "ds3_gather_for_generation=True",
    "the run starts its rollout workers and waits for them": "vllm_server_timeout=240.0",
    "the run's weight store transfers the weights": "vllm_group_port=51216",
    "belongs to a loss_type that is not supported": "sapo_temperature_neg=1.05"
    " sapo_temperature_pos=1.0 vespo_k_pos=2.0 vespo_lambda_pos=3.0 vespo_k_neg=3.0"
    " vespo_lambda_neg=2.0",
    "belongs to sync_ref_model, which is not supported": "ref_model_mixup_alpha=0.6"
    " ref_model_sync_steps=512",
    "models read only text": "log_multimodal=True",
}
"""Ignored fields and their defaults, by the reason why the fields have no effect."""

_REFUSED_BY_REMEDY = {
    "AdamW is the only optimizer; remove it": "optim='adamw_torch_fused'",
    "set adam_beta1, adam_beta2, adam_epsilon, weight_decay": "optim_args=None",
    "remove it": "optim_target_modules=None multi_objective_aggregation='sum_then_normalize'",
    "remove it, because a policy has no labels": "label_smoothing_factor=0.0",
    "set bf16 = True, or neither for float32 on a CPU": "fp16=False",
    "set only torch_compile = True": "torch_compile_backend=None torch_compile_mode=None",
    "remove it, because sampled tokens are trained on unchanged": "neftune_noise_alpha=None",
    "lower learner.max_tokens_per_micro_batch in overrides; the loss does not depend on it": (
        "auto_find_batch_size=False"
    ),
    "remove it, and publish the project with trackio's own functions": "trackio_bucket_id=None"
    " trackio_static_space_id=None",
    "remove it, because a run resumes from checkpoints": "save_only_model=False",
    "upload the folder that trainer.save_model wrote with huggingface_hub": "push_to_hub=False"
    " hub_token=None hub_private_repo=None hub_model_id=None hub_strategy='every_save'"
    " hub_always_push=False hub_revision=None",
    "transcripts.jsonl in the run folder contains completions": "log_completions_hub_repo=None",
    "compare eval_reward in trainer.state.log_history; each checkpoint contains its model": (
        "load_best_model_at_end=False metric_for_best_model=None greater_is_better=None"
    ),
    "pass overrides = ['learner.num_ranks=N'] to GRPOTrainer": "parallelism_config=None fsdp=None"
    " fsdp_config=None deepspeed=None",
    "remove it, because reward functions get every column": "remove_unused_columns=False"
    " label_names=None",
    "remove it, because rows are always shuffled": "train_sampling_strategy='random'",
    "remove it, because rows are shuffled differently in each epoch": "shuffle_dataset=True",
    "pass the model's folder; bf16 sets its type": "model_init_kwargs=None",
    "use a model that transformers supports": "trust_remote_code=False",
    "remove it, because it is not part of the loss": "router_aux_loss_coef=None",
    "set bf16 = False for float32 throughout": "cast_lm_head_to_fp32=False",
    "set temperature, top_p, top_k, min_p, repetition_penalty": "generation_kwargs=None",
    "remove it, or set use_vllm = False for transformers": "vllm_model_impl='vllm'",
    "let the reward function score the format": "vllm_structured_outputs_regex=None",
    "the reference is the starting policy": "sync_ref_model=False",
    "remove it, because all sampled tokens are trained on": "top_entropy_quantile=1.0",
    "set vllm_importance_sampling_mode = 'sequence_mask' with a clip_max": (
        "off_policy_mask_threshold=None"
    ),
}
"""Refused fields and their defaults, by the remedy for the error."""


def _read_table(fields_by_explanation: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return the default of each field, and the reason or remedy for it."""
    return {
        name: (ast.literal_eval(default), explanation)
        for explanation, fields in fields_by_explanation.items()
        for name, _, default in (field.partition("=") for field in fields.split())
    }


IGNORED_FIELDS = _read_table(_IGNORED_BY_REASON)
REFUSED_FIELDS = _read_table(_REFUSED_BY_REMEDY)
DEFAULTS: Mapping[str, Any] = {
    name: default
    for name, (default, _) in {**MAPPED_FIELDS, **IGNORED_FIELDS, **REFUSED_FIELDS}.items()
}
"""Defaults of all fields."""


class GRPOConfig:
    """The settings of a TRL script, with the names and defaults of TRL 1.16.

    Fields can be read and set as in TRL. `run_settings` converts them into the configuration of a
    run; docs/from-trl.md contains the table.
    """

    def __init__(self, output_dir: str | None = None, **fields: Any) -> None:
        """Set the fields; a field that has no effect here is reported on stderr.

        Raises:
            ConfigError: TRL has no such field, or its value is not supported.
        """
        self.__dict__.update(DEFAULTS)
        self.output_dir = output_dir
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in MAPPED_FIELDS:
            value = check_value(f"GRPOConfig.{name}", MAPPED_FIELDS[name][1], value)
        elif name in REFUSED_FIELDS:
            _check_refused_field(name, value)
        elif name not in IGNORED_FIELDS:
            hint = did_you_mean(name, DEFAULTS) or "see docs/from-trl.md"
            raise ConfigError(f"GRPOConfig has no field '{name}' in TRL 1.16; {hint}")
        elif value != DEFAULTS[name]:
            sys.stderr.write(
                f"note: GRPOConfig.{name} has no effect here: {IGNORED_FIELDS[name][1]}\n"
            )
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"GRPOConfig has no field '{name}' in TRL 1.16")

    def __repr__(self) -> str:
        fields = {name: value for name, value in vars(self).items() if DEFAULTS[name] != value}
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _check_refused_field(name: str, value: Any) -> None:
    default, remedy = REFUSED_FIELDS[name]
    if name == "optim" and str(value) in ("adamw_torch", "adamw_torch_fused"):
        return
    if value != default and value not in (None, "", {}, []):
        raise ConfigError(
            f"GRPOConfig.{name} = {value!r:.100} is not supported, expected {default!r}; {remedy}"
        )
