"""All keys of Forge's files, and the types of the supported keys. Any other key is an error.

Sources: https://github.com/meta-pytorch/torchforge, apps/grpo/*.yaml and apps/blackjack/*.yaml, the
configuration of https://github.com/pytorch/torchtitan, and vLLM's EngineArgs and SamplingParams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ludus.proto.config.section import (
    DecayRate,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Temperature,
)
from ludus.trainer.compat.checks import Penalty, Share, ShareBelow1, Text, check_value

_TITAN_FIELDS: Mapping[str, str] = {
    "model": "name flavor tokenizer_path hf_assets_path converters print_after_conversion",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps"
    " enable_cpu_offload dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug seed"
    " deterministic debug_moe_force_load_balance",
    "compile": "enable components backend",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree"
    " enable_compiled_autograd fsdp_reshard_after_forward tensor_parallel_degree"
    " disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree"
    " pipeline_parallel_split_points pipeline_parallel_layers_per_stage"
    " pipeline_parallel_schedule pipeline_parallel_schedule_csv"
    " pipeline_parallel_microbatch_size context_parallel_degree context_parallel_rotate_method"
    " expert_parallel_degree expert_tensor_parallel_degree",
    "checkpoint": "enable folder interval initial_load_path initial_load_model_only"
    " initial_load_in_hf last_save_model_only last_save_in_hf export_dtype async_mode"
    " keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint"
    " create_seed_checkpoint load_only",
    "activation_checkpoint": "mode selective_ac_option early_stop memory_budget",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder",
}
_ENGINE_FIELDS = (
    "model tokenizer tokenizer_mode trust_remote_code dtype kv_cache_dtype seed max_model_len"
    " tensor_parallel_size pipeline_parallel_size data_parallel_size enforce_eager"
    " gpu_memory_utilization max_num_seqs max_num_batched_tokens enable_prefix_caching"
    " enable_chunked_prefill swap_space cpu_offload_gb block_size quantization load_format"
    " revision download_dir disable_log_stats distributed_executor_backend"
    " disable_custom_all_reduce max_logprobs enable_expert_parallel served_model_name"
    " compilation_config hf_overrides skip_tokenizer_init logprobs_mode"
)
_SAMPLING_FIELDS = (
    "n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p"
    " seed stop stop_token_ids bad_words include_stop_str_in_output ignore_eos max_tokens"
    " min_tokens logprobs prompt_logprobs detokenize skip_special_tokens"
    " spaces_between_special_tokens truncate_prompt_tokens output_kind guided_decoding"
    " structured_outputs logit_bias allowed_token_ids extra_args"
)
_PROCESS_FIELDS = "procs hosts num_replicas with_gpus mesh_name"
_SERVICE_NAMES = "policy ref_model reward_actor"
_ACTOR_NAMES = "dataset trainer replay_buffer compute_advantages blackjack_env env_actor"
_LOGGING_FIELDS = (
    "project group entity name logging_mode per_rank_share_run reduce_across_ranks log_per_rank"
)

_FIELDS_BY_SECTION: Mapping[str, str] = {
    "": "group_size local_batch_size batch_size max_req_tokens max_res_tokens max_seq_len model"
    " off_by_n rollout_threads training_threads accept_truncated",
    "metric_logging.wandb.": _LOGGING_FIELDS,
    "metric_logging.console.": _LOGGING_FIELDS,
    "dataset.": "path revision data_split streaming model seed shuffle_buffer_size",
    "blackjack_env.": "server_url server_port game_name model max_seq_len max_turns"
    " generation_timeout",
    "grpo.": "group_size accept_truncated include_truncated_in_buffer",
    "policy.": "use_vllm_builtin_load use_dcp_for_weight_sync prefetch_weights_to_shm"
    " n_fetcher_procs",
    **{f"policy.{name}.": _ENGINE_FIELDS for name in ("engine_args", "engine_config")},
    **{f"policy.{name}.": _SAMPLING_FIELDS for name in ("sampling_params", "sampling_config")},
    "trainer.": "use_dcp use_vllm_builtin_load dcp_path",
    "replay_buffer.": "batch_size max_policy_age dp_size seed max_buffer_size max_resample_count",
    "provisioner.": "launcher job_name services",
    **{f"trainer.{name}.": fields for name, fields in _TITAN_FIELDS.items()},
    **{f"ref_model.{name}.": fields for name, fields in _TITAN_FIELDS.items()},
    **{f"services.{name}.": _PROCESS_FIELDS for name in _SERVICE_NAMES.split()},
    **{f"actors.{name}.": _PROCESS_FIELDS for name in _ACTOR_NAMES.split()},
}


KNOWN_KEYS = frozenset(
    section + name for section, names in _FIELDS_BY_SECTION.items() for name in names.split()
)
"""All dotted keys."""

ALL = -1
"""Value that means all tokens (top_k), all steps, or all shards."""
_AtLeastTwo = Annotated[int, Field(ge=2)]
_ModelPath = Annotated[
    str, Field(min_length=1, description="a text: a folder, or a Hugging Face model id")
]
_UNSUPPORTED_PARALLELISMS = (
    "data_parallel_replicate tensor_parallel pipeline_parallel context_parallel expert_parallel"
    " expert_tensor_parallel"
)
UNSUPPORTED_DEGREES = tuple(
    f"{section}.parallelism.{parallelism}_degree"
    for section in ("trainer", "ref_model")
    for parallelism in _UNSUPPORTED_PARALLELISMS.split()
)
"""Keys of unsupported kinds of parallelism; their values must be 1."""

_KEYS_BY_TYPE: Mapping[Any, str] = {
    _AtLeastTwo: "group_size grpo.group_size max_seq_len blackjack_env.max_seq_len"
    " trainer.training.seq_len policy.engine_args.max_model_len",
    PositiveInt: "local_batch_size batch_size max_req_tokens max_res_tokens rollout_threads"
    " replay_buffer.batch_size replay_buffer.dp_size trainer.training.local_batch_size"
    " trainer.training.steps trainer.checkpoint.interval trainer.checkpoint.keep_latest_k"
    " trainer.parallelism.data_parallel_shard_degree actors.trainer.procs"
    " services.policy.num_replicas blackjack_env.max_turns policy.engine_args.max_num_seqs"
    " policy.engine_args.pipeline_parallel_size policy.engine_args.tensor_parallel_size"
    f" policy.sampling_params.n policy.sampling_params.max_tokens {' '.join(UNSUPPORTED_DEGREES)}",
    NonNegativeInt: "off_by_n replay_buffer.max_policy_age trainer.lr_scheduler.warmup_steps"
    " policy.sampling_params.top_k",
    LearningRate: "trainer.optimizer.lr",
    DecayRate: "trainer.optimizer.beta1 trainer.optimizer.beta2",
    PositiveFloat: "trainer.optimizer.eps trainer.training.max_norm",
    NonNegativeFloat: "trainer.optimizer.weight_decay",
    Annotated[float, Field(ge=0, le=1)]: "trainer.lr_scheduler.min_lr_factor",
    Share: "policy.engine_args.gpu_memory_utilization policy.sampling_params.top_p",
    ShareBelow1: "policy.sampling_params.min_p",
    Temperature: "policy.sampling_params.temperature",
    Penalty: "policy.sampling_params.repetition_penalty",
    Literal["constant", "linear", "cosine"]: "trainer.lr_scheduler.decay_type",
    Literal["bfloat16", "float32"]: "trainer.training.dtype",
    Literal["auto", "bfloat16", "float32"]: "policy.engine_args.dtype",
    Literal["none", "selective", "full"]: "trainer.activation_checkpoint.mode",
    bool: "trainer.checkpoint.enable trainer.compile.enable services.policy.with_gpus"
    " actors.trainer.with_gpus policy.engine_args.enforce_eager",
    _ModelPath: "model blackjack_env.model dataset.model policy.engine_args.model"
    " trainer.model.hf_assets_path trainer.checkpoint.initial_load_path"
    " ref_model.model.hf_assets_path ref_model.checkpoint.initial_load_path",
    Text: "blackjack_env.server_url blackjack_env.game_name metric_logging.wandb.project"
    " metric_logging.wandb.entity",
}
TYPE_BY_KEY: Mapping[str, Any] = {
    key: value_type for value_type, keys in _KEYS_BY_TYPE.items() for key in keys.split()
}
"""Type of each key. Values of other keys are ignored or checked elsewhere.

The ranges are those of the run's settings. They are repeated here so that errors use Forge's names.
"""
_ALL_VALUE_BY_KEY: Mapping[str, int] = {
    "trainer.training.steps": ALL,
    "trainer.parallelism.data_parallel_shard_degree": ALL,
    "replay_buffer.dp_size": ALL,
    "policy.sampling_params.top_k": ALL,
    "trainer.checkpoint.keep_latest_k": 0,
}
"""Value that means all, by key. It is outside the range of the key's type."""
_OLDER_SECTION_NAMES = {
    "policy.engine_args": "policy.engine_config",
    "policy.sampling_params": "policy.sampling_config",
}


def find_older_key(key: str) -> str | None:
    """Return the name that a key has in older files; None if it is the same."""
    section, _, name = key.rpartition(".")
    return f"{_OLDER_SECTION_NAMES[section]}.{name}" if section in _OLDER_SECTION_NAMES else None


def check_key(key: str, value: Any, *, source_key: str) -> Any:
    """Convert the value of a key to its type; text that contains a number becomes a number.

    Args:
        source_key: key to name in errors. It differs from `key` if the file uses an older name, or
            if the value of `key` refers to another key.
    """
    if value is None or key not in TYPE_BY_KEY:
        return value
    alternative = ""
    if key in _ALL_VALUE_BY_KEY:
        value_for_all = _ALL_VALUE_BY_KEY[key]
        if str(value) == str(value_for_all):
            return value_for_all
        alternative = f", or {value_for_all} for all"
    return check_value(source_key, TYPE_BY_KEY[key], value, strict=False, alternative=alternative)
