"""The mapping from the keys of a Forge configuration to the configuration of a run.

docs/from-forge.md contains the table. Preset "torchforge" contains the settings that Forge defines
in code: its algorithm, with a KL coefficient of 0.1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludus.proto.config.presets import merge_sections
from ludus.proto.errors import ConfigError, did_you_mean
from ludus.trainer.compat.forge.configuration import LUDUS_SECTION, ForgeConfig, ForgeKeys
from ludus.trainer.compat.forge.keys import ALL, KNOWN_KEYS, UNSUPPORTED_DEGREES

TINY_MODEL = "tiny"
_HUB_PREFIX = "hf://"
_UNLIMITED = 1_000_000
"""Number of steps if a file sets none. Forge's files contain this number."""
_DEFAULT_GROUP_SIZE, _DEFAULT_MAX_REQUEST, _DEFAULT_MAX_RESPONSE = 4, 512, 32
"""Defaults if a file does not set these keys."""
_NUM_GAMES = 1_000
"""Number of episodes of the evaluation after the last step, which Forge does not have."""
_MODEL_KEYS = (
    *("model", "policy.engine_args.model", "blackjack_env.model", "dataset.model"),
    *("trainer.model.hf_assets_path", "trainer.checkpoint.initial_load_path"),
    *("ref_model.model.hf_assets_path", "ref_model.checkpoint.initial_load_path"),
)
_ALWAYS_TRUE_KEYS = (
    "trainer.checkpoint.initial_load_in_hf",
    "trainer.checkpoint.last_save_in_hf",
    "ref_model.checkpoint.enable",
    "ref_model.checkpoint.initial_load_in_hf",
)
"""Keys that may be true without effect: models are always stored in the Hugging Face format."""
_KEY_BY_SETTING = {
    "environment.address": "blackjack_env.server_url",
    "environment.max_turns": "blackjack_env.max_turns",
    "rollout.num_workers": "services.policy.num_replicas",
    "rollout.temperature": "policy.sampling_params.temperature",
    "rollout.top_p": "policy.sampling_params.top_p",
    "rollout.min_p": "policy.sampling_params.min_p",
    "rollout.repetition_penalty": "policy.sampling_params.repetition_penalty",
    "learner.learning_rate": "trainer.optimizer.lr",
    "learner.schedule": "trainer.lr_scheduler.decay_type",
    "learner.warmup_steps": "trainer.lr_scheduler.warmup_steps",
    "learner.eps": "trainer.optimizer.eps",
    "learner.weight_decay": "trainer.optimizer.weight_decay",
    "learner.max_grad_norm": "trainer.training.max_norm",
    "learner.compile": "trainer.compile.enable",
}
"""Forge's key by the setting of a run that takes the same value."""
_KEY_BY_VLLM_SETTING = {
    "generator.tensor_parallel_size": "policy.engine_args.tensor_parallel_size",
    "generator.enforce_eager": "policy.engine_args.enforce_eager",
    "generator.gpu_memory_utilization": "policy.engine_args.gpu_memory_utilization",
    "generator.max_num_seqs": "policy.engine_args.max_num_seqs",
    "generator.max_model_tokens": "policy.engine_args.max_model_len",
}


@dataclass(frozen=True, slots=True)
class MappedConfig:
    """A Forge configuration, mapped to a run."""

    sections: dict[str, Any]
    """Sections of the run."""
    unused_keys: tuple[str, ...]
    """Forge keys in the file that have no effect."""
    key_by_setting: Mapping[str, str]
    """Key in the file by setting of the run, for `rename_in_errors`."""


def map_config(config: ForgeConfig, *, name: str, has_gpu: bool) -> MappedConfig:
    """Map a configuration to the sections of a run.

    Args:
        name: the name of the run.
        has_gpu: whether vLLM is the default engine; on a CPU, transformers is faster for small
            models.
    """
    keys = ForgeKeys(config)
    _check_names(keys)
    _refuse_other_values(keys)
    ludus_section = config.get(LUDUS_SECTION) or {}
    engine = (ludus_section.get("generator") or {}).get("kind") or (
        "vllm" if has_gpu else "transformers"
    )
    settings = {**_KEY_BY_SETTING, **(_KEY_BY_VLLM_SETTING if engine == "vllm" else {})}
    sections: dict[str, Any] = {
        "preset": "torchforge",
        "name": name,
        "environment": {"kind": "remote"},
        "generator": {"kind": engine},
        "rollout": {},
        "learner": {},
        "eval": {"num_games": _NUM_GAMES, "num_games_during": 0},
    }
    for setting, key in settings.items():
        section, field = setting.split(".")
        sections[section][field] = keys.get(key)
    _add_sizes(sections, keys)
    sections["training"] |= _make_checkpoint_settings(keys, sections["training"]["num_steps"])
    sections["learner"] |= _make_learner_settings(keys)
    sections["metrics"] = _make_metrics_section(keys)
    sections["model"] = _make_model_section(keys, sections["rollout"]["max_tokens"])
    _add_gpus(sections, keys, ludus_section, has_gpu=has_gpu)
    # The preset provides the values that the file does not set.
    sections = {key: _drop_none(section) for key, section in sections.items()}
    if "environments" in ludus_section:
        del sections["environment"]
    elif not sections["environment"].get("address") and "environment" not in ludus_section:
        raise ConfigError(
            "blackjack_env.server_url is required; set it to the address of a server, or add a "
            "section ludus.environment"
        )
    return MappedConfig(
        merge_sections(sections, ludus_section),
        tuple(keys.unread_keys),
        _name_settings(settings, keys, ludus_section),
    )


def _name_settings(
    settings: Mapping[str, str], keys: ForgeKeys, ludus_section: Mapping[str, Any]
) -> dict[str, str]:
    """Return the key by setting; settings in section `ludus` have keys in that section."""
    has_limit = keys.get("blackjack_env.max_seq_len", "max_seq_len") is not None
    lengths = {
        "max_completion_tokens": "max_res_tokens",
        "max_tokens": "max_seq_len" if has_limit else "max_req_tokens + max_res_tokens",
    }
    names = {**settings, **lengths, "rollout.max_tokens": lengths["max_tokens"]}
    for setting in ("generator.kind", "rollout.num_gpus_per_worker"):
        names[setting] = f"{LUDUS_SECTION}.{setting}"
    for section, fields in ludus_section.items():
        if isinstance(fields, Mapping):
            names |= {
                f"{section}.{field}": f"{LUDUS_SECTION}.{section}.{field}" for field in fields
            }
    return names


def _drop_none(section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    return {name: _drop_none(value) for name, value in section.items() if value is not None}


def _check_names(keys: ForgeKeys) -> None:
    unknown_names = [
        key
        for key in keys
        # A section without content has no effect.
        if key not in KNOWN_KEYS and not (_is_section(key) and keys.get(key) is None)
    ]
    if unknown_names:
        lines = [f"  {key}: {_make_hint(key)}" for key in unknown_names]
        raise ConfigError("unknown keys in the Forge configuration:\n" + "\n".join(lines))


def _is_section(key: str) -> bool:
    return key == LUDUS_SECTION or any(name.startswith(f"{key}.") for name in KNOWN_KEYS)


def _make_hint(key: str) -> str:
    if _is_section(key):
        return "must be a section with keys, got a value"
    section = key.rpartition(".")[0]
    siblings = [name for name in KNOWN_KEYS if name.rpartition(".")[0] == section]
    suggestion = did_you_mean(key, siblings or KNOWN_KEYS)
    problem = f"unknown, {suggestion}" if suggestion else "unknown"
    return f"{problem}; Ludus fields belong in the `{LUDUS_SECTION}` section"


def _refuse_other_values(keys: ForgeKeys) -> None:
    reasons = dict.fromkeys(
        UNSUPPORTED_DEGREES,
        "the learner supports sharded data parallelism only (data_parallel_shard_degree)",
    )
    reasons["policy.engine_args.pipeline_parallel_size"] = "engines use tensor_parallel_size only"
    for key, reason in reasons.items():
        if keys.get(key, default=1) != 1:
            raise ConfigError(f"{key} = {keys.get(key)} must be 1, because {reason}; set it to 1")
    optimizer = keys.get("trainer.optimizer.name", default="AdamW")
    if optimizer != "AdamW":
        raise ConfigError(f"trainer.optimizer.name = '{optimizer}' must be AdamW; set it to AdamW")
    keys.get("blackjack_env.game_name")  # compared with the server's game later


def _add_sizes(sections: dict[str, Any], keys: ForgeKeys) -> None:
    """Add the sizes of groups, batches and episodes."""
    group_size = keys.get("group_size", "grpo.group_size", default=_DEFAULT_GROUP_SIZE)
    rank_batch_size = keys.get(
        *("replay_buffer.batch_size", "trainer.training.local_batch_size"),
        *("local_batch_size", "batch_size"),
        default=group_size,
    )
    num_ranks = _count_ranks(keys)
    dp_size = keys.get("replay_buffer.dp_size", default=ALL)
    if dp_size not in (ALL, num_ranks):
        raise ConfigError(
            f"replay_buffer.dp_size = {dp_size}, but the trainer has {num_ranks} data-parallel "
            "ranks; make them equal"
        )
    num_groups, remainder = divmod(rank_batch_size * num_ranks, group_size)
    if remainder or not num_groups:
        raise ConfigError(
            f"local_batch_size = {rank_batch_size} on {num_ranks} ranks must be a multiple of "
            f"group_size = {group_size}, because a step trains on whole groups; for example "
            f"{max(1, num_groups) * group_size}"
        )
    num_samples = keys.get("policy.sampling_params.n", default=1)
    if num_samples not in (1, group_size):
        raise ConfigError(
            f"policy.sampling_params.n = {num_samples} must be 1 or group_size = {group_size}, the "
            "number of episodes in a group"
        )
    top_k = keys.get("policy.sampling_params.top_k")
    num_threads = keys.get("rollout_threads", default=1)
    sections["rollout"] |= {
        "group_size": group_size,
        "num_groups_in_flight": max(num_threads, num_groups),
        "top_k": 0 if top_k == ALL else top_k,
        **_find_lengths(keys),
    }
    num_steps = keys.get("trainer.training.steps", default=ALL)
    sections["training"] = {
        "num_steps": _UNLIMITED if num_steps == ALL else num_steps,
        "groups_per_step": num_groups,
        "max_staleness": keys.get("replay_buffer.max_policy_age", "off_by_n"),
    }
    sections["learner"]["num_ranks"] = num_ranks


def _find_lengths(keys: ForgeKeys) -> dict[str, int]:
    """Return the maximum numbers of tokens of an episode and of a completion."""
    max_response = keys.get("max_res_tokens")
    max_tokens = keys.get("blackjack_env.max_seq_len", "max_seq_len")
    if max_tokens is None:
        max_request = keys.get("max_req_tokens", default=_DEFAULT_MAX_REQUEST)
        max_tokens = max_request + (max_response or _DEFAULT_MAX_RESPONSE)
    max_completion = keys.get("policy.sampling_params.max_tokens")
    if max_completion is not None and max_completion >= max_tokens:
        # The limit is the length of the whole episode, so half of it is reserved for prompts.
        max_completion = max_response or max_tokens // 2
    if max_response is not None and max_completion not in (None, max_response):
        raise ConfigError(
            f"policy.sampling_params.max_tokens = {max_completion}, but max_res_tokens = "
            f"{max_response}; make them equal"
        )
    seq_len = keys.get("trainer.training.seq_len", default=max_tokens)
    if seq_len < max_tokens:
        raise ConfigError(
            f"trainer.training.seq_len = {seq_len} is less than the {max_tokens} tokens of an "
            "episode, from max_seq_len or max_req_tokens and max_res_tokens; raise seq_len or "
            "lower the others"
        )
    return {
        "max_tokens": max_tokens,
        "max_completion_tokens": max_response or max_completion or max_tokens // 2,
    }


def _make_checkpoint_settings(keys: ForgeKeys, num_steps: int) -> dict[str, Any]:
    """Return the checkpoint settings; a run always writes a checkpoint at its end."""
    keys.mark_read_if_true(*_ALWAYS_TRUE_KEYS)
    interval = keys.get("trainer.checkpoint.interval")
    num_kept = keys.get("trainer.checkpoint.keep_latest_k")
    is_enabled = keys.get("trainer.checkpoint.enable", default=True)
    return {
        "checkpoint_every_steps": interval if is_enabled else num_steps + 1,
        "checkpoint_every_s": None,
        "keep_checkpoints": _UNLIMITED if num_kept == 0 else num_kept,
    }


def _count_ranks(keys: ForgeKeys) -> int:
    num_shards: int = keys.get("trainer.parallelism.data_parallel_shard_degree", default=ALL)
    num_processes: int = keys.get("actors.trainer.procs", default=1)
    if num_shards == ALL:
        return num_processes
    if "actors.trainer.procs" in keys and num_processes != num_shards:
        raise ConfigError(
            f"actors.trainer.procs = {num_processes}, but trainer.parallelism."
            f"data_parallel_shard_degree = {num_shards}; each rank is a process, so make them equal"
        )
    return num_shards


def _make_model_section(keys: ForgeKeys, max_tokens: int) -> dict[str, Any]:
    paths = {key: path.removeprefix(_HUB_PREFIX) for key in _MODEL_KEYS if (path := keys.get(key))}
    if len(set(paths.values())) > 1:
        pairs = ", ".join(f"{key} = '{path}'" for key, path in paths.items())
        raise ConfigError(
            f"policy, trainer and reference must start from the same model, got {pairs}; name one "
            "model"
        )
    path = next(iter(paths.values()), TINY_MODEL)
    if path == TINY_MODEL:
        return {"kind": "tiny", "max_tokens": max_tokens}
    return {"kind": "pretrained", "path": path}


def _make_learner_settings(keys: ForgeKeys) -> dict[str, Any]:
    """Return the settings of the learner that are combined from several keys."""
    learning_rate = keys.get("trainer.optimizer.lr")
    final_factor = keys.get("trainer.lr_scheduler.min_lr_factor")
    beta1, beta2 = keys.get("trainer.optimizer.beta1"), keys.get("trainer.optimizer.beta2")
    # Forge's defaults replace a missing beta.
    betas = [0.9 if beta1 is None else beta1, 0.95 if beta2 is None else beta2]
    mode = keys.get("trainer.activation_checkpoint.mode")
    return {
        "learning_rate_final": learning_rate * final_factor
        if learning_rate and final_factor
        else None,
        "betas": None if beta1 is None and beta2 is None else betas,
        "dtype": _find_dtype(keys),
        "activation_checkpointing": None if mode is None else mode != "none",
    }


def _find_dtype(keys: ForgeKeys) -> str | None:
    """Return the data type of both trainer and policy."""
    trainer_dtype: str | None = keys.get("trainer.training.dtype")
    policy_dtype: str | None = keys.get("policy.engine_args.dtype")
    if policy_dtype in (None, "auto"):
        return trainer_dtype
    if trainer_dtype not in (None, policy_dtype):
        raise ConfigError(
            f"policy.engine_args.dtype = '{policy_dtype}', but trainer.training.dtype = "
            f"'{trainer_dtype}'; their log-probs are compared, so make them equal"
        )
    return policy_dtype


def _make_metrics_section(keys: ForgeKeys) -> dict[str, Any]:
    """Return section `metrics`; without an API key, W&B data stays in the run folder."""
    project = keys.get("metric_logging.wandb.project")
    if project is None:
        return {}
    mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    entity = keys.get("metric_logging.wandb.entity")
    return {"wandb": {"project": project, "entity": entity, "mode": mode}}


def _add_gpus(
    sections: dict[str, Any], keys: ForgeKeys, ludus_section: Mapping[str, Any], *, has_gpu: bool
) -> None:
    policy_has_gpus = keys.get("services.policy.with_gpus")
    trainer_has_gpus = keys.get("actors.trainer.with_gpus")
    num_gpus = sections["generator"].get("tensor_parallel_size") or 1
    if num_gpus > 1 and not policy_has_gpus and "rollout" not in ludus_section:
        raise ConfigError(
            f"policy.engine_args.tensor_parallel_size = {num_gpus} needs that number of "
            "GPUs, but services.policy.with_gpus is not true; set it to true"
        )
    if has_gpu and policy_has_gpus:
        sections["rollout"]["num_gpus_per_worker"] = num_gpus
    if has_gpu and trainer_has_gpus:
        sections["learner"]["num_gpus_per_rank"] = 1
