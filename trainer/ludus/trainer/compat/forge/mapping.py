"""Maps each key of a Forge configuration to the configuration of a run.

    group_size, local_batch_size, dp_size   -> rollout.group_size, training.groups_per_step
    max_req_tokens, max_res_tokens          -> rollout.max_tokens, rollout.max_completion_tokens
    off_by_n                                -> training.max_staleness
    rollout_threads, services.policy        -> rollout.num_groups_in_flight, rollout.num_workers
    model                                   -> model.path; "tiny" creates a small model
    blackjack_env.server_url                -> environment.address
    policy                                  -> generator, rollout.temperature, rollout.top_p
    trainer                                 -> learner, training.num_steps, checkpoints
    ludus                                   -> overrides of all of these, in Ludus' names

Preset "torchforge" contains what Forge defines in code: its algorithm, with a KL coefficient of 0.1
for the initial policy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludus.proto.config.presets import merge_sections
from ludus.proto.errors import ConfigError, did_you_mean
from ludus.trainer.compat.forge.combinations import check_combinations
from ludus.trainer.compat.forge.configuration import ForgeConfig, ForgeKeys
from ludus.trainer.compat.forge.known_keys import known_keys
from ludus.trainer.compat.forge.values import ALL, UNSUPPORTED_DEGREES

LUDUS_SECTION = "ludus"
"""Section with fields of a run, which override the values of Forge's keys."""
TINY = "tiny"
_HUB = "hf://"
_UNLIMITED = 1_000_000
"""Number of steps of a file without one; Forge's files contain this number."""
_GROUP_SIZE, _MAX_REQUEST, _MAX_RESPONSE = 4, 512, 32
"""Defaults of a file without these keys."""
_NUM_GAMES = 1_000
"""Number of episodes of the evaluation after the last step, which Forge does not have."""
_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty")
"""Parameters of vLLM that rollouts support under the same names."""
_ALWAYS_TRUE = (
    "trainer.checkpoint.initial_load_in_hf",
    "trainer.checkpoint.last_save_in_hf",
    "ref_model.checkpoint.enable",
    "ref_model.checkpoint.initial_load_in_hf",
)
"""Keys whose value true is always fulfilled: models are stored in the Hugging Face format."""
_SHARDING_ONLY = "the learner supports sharded data parallelism only (data_parallel_shard_degree)"


@dataclass(frozen=True, slots=True)
class MappedConfig:
    """A Forge configuration, mapped to a run."""

    tree: dict[str, Any]
    """Sections of the run."""
    unused: tuple[str, ...]
    """Forge keys in the file that have no effect."""


def run_tree(config: ForgeConfig, *, name: str, has_gpu: bool) -> MappedConfig:
    """Map a configuration to the sections of a run.

    Args:
        name: the name of the run.
        has_gpu: whether vLLM is the default engine; on a CPU, transformers is faster for small
            models.

    Raises:
        ConfigError: a key does not exist in Forge, or a value is not supported.
    """
    keys = ForgeKeys(config, excluded=LUDUS_SECTION)
    _check_names(keys)
    _refuse_other_parallelism(keys)
    _refuse_other_optimizers(keys)
    environment = _environment(keys)
    rollout, training = _sizes(keys)
    ludus_section = config.get(LUDUS_SECTION) or {}
    engine = (ludus_section.get("generator") or {}).get("kind") or (
        "vllm" if has_gpu else "transformers"
    )
    tree: dict[str, Any] = {
        "preset": "torchforge",
        "name": name,
        "model": _model(keys, rollout["max_tokens"]),
        "generator": _generator(keys, engine),
        "rollout": rollout,
        "learner": _learner(keys),
        "training": training,
        "metrics": _metrics(keys),
        "eval": {"num_games": _NUM_GAMES, "num_games_during": 0},
    }
    _add_gpus(tree, keys, has_gpu=has_gpu)
    check_combinations(tree, ludus_section)
    if "environments" not in ludus_section:
        tree["environment"] = environment
        if "address" not in environment and "environment" not in ludus_section:
            raise ConfigError(
                "blackjack_env.server_url is required; set it to the address of a server, or add a "
                "section ludus.environment"
            )
    return MappedConfig(merge_sections(tree, ludus_section), tuple(keys.unread))


def _check_names(keys: ForgeKeys) -> None:
    known_names = known_keys()
    unknown_names = [
        key for key in keys if key not in known_names and not _is_empty(key, keys, known_names)
    ]
    if not unknown_names:
        return
    lines = [f"  {key}: {_hint(key, known_names)}" for key in unknown_names]
    raise ConfigError("unknown keys in the Forge configuration:\n" + "\n".join(lines))


def _is_empty(key: str, keys: ForgeKeys, known_names: frozenset[str]) -> bool:
    """Return whether the key is a section without content."""
    return _is_section(key, known_names) and keys.get(key) is None


def _is_section(key: str, known_names: frozenset[str]) -> bool:
    return key == LUDUS_SECTION or any(name.startswith(f"{key}.") for name in known_names)


def _hint(key: str, known_names: frozenset[str]) -> str:
    if _is_section(key, known_names):
        return "must be a section with keys, got a value"
    section = key.rpartition(".")[0]
    siblings = [name for name in known_names if name.rpartition(".")[0] == section]
    suggestion = did_you_mean(key, siblings or known_names)
    unknown = f"unknown, {suggestion}" if suggestion else "unknown"
    return f"{unknown}; Ludus fields belong in the `{LUDUS_SECTION}` section"


def _refuse_other_parallelism(keys: ForgeKeys) -> None:
    for degree in UNSUPPORTED_DEGREES:
        _require_one(keys, degree, _SHARDING_ONLY)
    for name in ("engine_args", "engine_config"):
        reason = "engines support tensor_parallel_size only"
        _require_one(keys, f"policy.{name}.pipeline_parallel_size", reason)


def _require_one(keys: ForgeKeys, key: str, reason: str) -> None:
    value = keys.get_int(key)
    if value not in (None, 1):
        raise ConfigError(f"{key} = {value} must be 1, because {reason}; set it to 1")


def _refuse_other_optimizers(keys: ForgeKeys) -> None:
    name = keys.get("trainer.optimizer.name")
    if name not in (None, "AdamW"):
        raise ConfigError(f"trainer.optimizer.name = '{name}' must be AdamW; set it to AdamW")


def _environment(keys: ForgeKeys) -> dict[str, Any]:
    environment = {
        "kind": "remote",
        "address": keys.get("blackjack_env.server_url") or None,
        "max_turns": keys.get_int("blackjack_env.max_turns"),
    }
    keys.get("blackjack_env.game_name")  # compared with the server's game later
    return _drop_none(environment)


def _sizes(keys: ForgeKeys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sections `rollout` and `training`."""
    group_size = keys.get_count("group_size", "grpo.group_size", default=_GROUP_SIZE)
    per_rank = keys.get_count(
        "replay_buffer.batch_size",
        "trainer.training.local_batch_size",
        "local_batch_size",
        "batch_size",
        default=group_size,
    )
    num_ranks = _num_ranks(keys)
    dp_size = keys.get_int("replay_buffer.dp_size")
    if dp_size not in (None, ALL, num_ranks):
        raise ConfigError(
            f"replay_buffer.dp_size = {dp_size}, but the trainer has {num_ranks} data-parallel "
            "ranks; make them equal"
        )
    groups, remainder = divmod(per_rank * num_ranks, group_size)
    if remainder or not groups:
        raise ConfigError(
            f"local_batch_size = {per_rank} on {num_ranks} ranks must be a multiple of group_size "
            f"= {group_size}, because a step trains on whole groups; for example "
            f"{max(1, groups) * group_size}"
        )
    max_response = keys.get_int("max_res_tokens")
    max_tokens = keys.get_int("blackjack_env.max_seq_len", "max_seq_len")
    if max_tokens is None:
        max_request = keys.get_count("max_req_tokens", default=_MAX_REQUEST)
        max_tokens = max_request + (max_response or _MAX_RESPONSE)
    _refuse_other_groups(keys, group_size)
    sampling = _sampling(keys, max_response, max_tokens)
    threads = keys.get_count("rollout_threads", default=1)
    rollout = {
        "group_size": group_size,
        "num_groups_in_flight": max(threads, groups),
        "num_workers": keys.get_int("services.policy.num_replicas"),
        "max_tokens": _check_length(max_tokens, keys),
        **sampling,
    }
    max_age = keys.get_int("replay_buffer.max_policy_age", "off_by_n")
    steps = keys.get_int("trainer.training.steps")
    steps = _UNLIMITED if steps in (None, ALL) else steps
    training = {"num_steps": steps, "groups_per_step": groups, "max_staleness": max_age}
    return _drop_none(rollout), _drop_none({**training, **_checkpoints(keys, steps)})


def _checkpoints(keys: ForgeKeys, steps: int) -> dict[str, Any]:
    """Return the checkpoint settings; a run always writes a checkpoint at its end."""
    keys.mark_read_if_true(*_ALWAYS_TRUE)
    interval = keys.get_int("trainer.checkpoint.interval")
    num_kept = keys.get_int("trainer.checkpoint.keep_latest_k")
    if keys.get("trainer.checkpoint.enable") is False:
        interval = steps + 1
    return {
        "checkpoint_every_steps": interval,
        "keep_checkpoints": _UNLIMITED if num_kept == 0 else num_kept,
    }


def _refuse_other_groups(keys: ForgeKeys, group_size: int) -> None:
    """Refuse a number of samples per request that is neither 1 nor the group size."""
    num = keys.get_int(*(f"policy.{name}.n" for name in ("sampling_params", "sampling_config")))
    if num not in (None, 1, group_size):
        raise ConfigError(
            f"policy.sampling_params.n = {num} must be 1 or group_size = {group_size}, the number "
            "of episodes in a group"
        )


def _sampling(keys: ForgeKeys, max_response: int | None, max_tokens: int) -> dict[str, Any]:
    names = [f"policy.{name}" for name in ("sampling_params", "sampling_config")]
    max_completion = keys.get_int(*(f"{name}.max_tokens" for name in names))
    if max_completion is not None and max_completion >= max_tokens:
        # The limit is as long as the whole episode: half of it is reserved for prompts.
        max_completion = max_response or max_tokens // 2
    if max_response is not None and max_completion not in (None, max_response):
        raise ConfigError(
            f"{names[0]}.max_tokens = {max_completion}, but max_res_tokens = {max_response}; make "
            "them equal"
        )
    top_k = keys.get_int(*(f"{name}.top_k" for name in names))
    return {
        "max_completion_tokens": max_response or max_completion or max_tokens // 2,
        "top_k": 0 if top_k == ALL else top_k,
        **{key: keys.get(*(f"{name}.{key}" for name in names)) for key in _SAMPLING},
    }


def _check_length(max_tokens: int, keys: ForgeKeys) -> int:
    """Return the maximum length of an episode if the trainer supports it."""
    limit = keys.get_int("trainer.training.seq_len")
    if limit is not None and limit < max_tokens:
        raise ConfigError(
            f"trainer.training.seq_len = {limit} is less than the {max_tokens} tokens of an "
            "episode, from max_seq_len or max_req_tokens and max_res_tokens; raise seq_len or "
            "lower the others"
        )
    return max_tokens


def _num_ranks(keys: ForgeKeys) -> int:
    shards = keys.get_int("trainer.parallelism.data_parallel_shard_degree")
    processes = keys.get_count("actors.trainer.procs", default=1)
    if shards is None or shards == ALL:
        return processes
    if "actors.trainer.procs" in keys and processes != shards:
        raise ConfigError(
            f"actors.trainer.procs = {processes}, but trainer.parallelism."
            f"data_parallel_shard_degree = {shards}; each rank is a process, so make them equal"
        )
    return shards


def _model(keys: ForgeKeys, max_tokens: int) -> dict[str, Any]:
    model_keys = (
        "model",
        "policy.engine_args.model",
        "policy.engine_config.model",
        "trainer.model.hf_assets_path",
        "trainer.checkpoint.initial_load_path",
        "ref_model.model.hf_assets_path",
        "ref_model.checkpoint.initial_load_path",
        "blackjack_env.model",
        "dataset.model",
    )
    values = {key: keys.get(key) for key in model_keys}
    paths = {key: path.removeprefix(_HUB) for key, path in values.items() if path is not None}
    if len(set(paths.values())) > 1:
        pairs = ", ".join(f"{key} = '{path}'" for key, path in paths.items())
        raise ConfigError(
            f"policy, trainer and reference must start from the same model, got {pairs}; name one "
            "model"
        )
    path = next(iter(paths.values()), TINY)
    if path == TINY:
        return {"kind": "tiny", "max_tokens": max_tokens}
    return {"kind": "pretrained", "path": path}


def _generator(keys: ForgeKeys, kind: str) -> dict[str, Any]:
    if kind != "vllm":
        return {"kind": kind}

    def engine(name: str) -> Any:
        return keys.get(f"policy.engine_args.{name}", f"policy.engine_config.{name}")

    vllm = {
        "kind": "vllm",
        "tensor_parallel_size": engine("tensor_parallel_size"),
        "enforce_eager": engine("enforce_eager"),
        "gpu_memory_utilization": engine("gpu_memory_utilization"),
        "max_num_seqs": engine("max_num_seqs"),
        "max_model_tokens": engine("max_model_len"),
    }
    return _drop_none(vllm)


def _learner(keys: ForgeKeys) -> dict[str, Any]:
    def get(name: str) -> Any:
        return keys.get(f"trainer.{name}")

    rate = keys.get_float("trainer.optimizer.lr")
    final_factor = keys.get_float("trainer.lr_scheduler.min_lr_factor")
    beta1, beta2 = (keys.get_float(f"trainer.optimizer.{name}") for name in ("beta1", "beta2"))
    mode = get("activation_checkpoint.mode")
    return _drop_none(
        {
            "num_ranks": _num_ranks(keys),
            "learning_rate": rate,
            "learning_rate_final": rate * final_factor if rate and final_factor else None,
            "schedule": get("lr_scheduler.decay_type"),
            "warmup_steps": get("lr_scheduler.warmup_steps"),
            "eps": get("optimizer.eps"),
            "betas": _betas(beta1, beta2),
            "weight_decay": get("optimizer.weight_decay"),
            "max_grad_norm": get("training.max_norm"),
            "dtype": _dtype(keys),
            "activation_checkpointing": None if mode is None else mode != "none",
            "compile": get("compile.enable"),
        }
    )


def _betas(beta1: float | None, beta2: float | None) -> list[float] | None:
    """Return AdamW's betas with Forge's default for a missing one; None if both are missing."""
    if beta1 is None and beta2 is None:
        return None
    return [0.9 if beta1 is None else beta1, 0.95 if beta2 is None else beta2]


def _dtype(keys: ForgeKeys) -> str | None:
    """Return the data type of both trainer and policy."""
    trainer = keys.get("trainer.training.dtype")
    policy = keys.get("policy.engine_args.dtype", "policy.engine_config.dtype")
    if policy == "auto":
        policy = None
    if None not in (trainer, policy) and trainer != policy:
        raise ConfigError(
            f"policy.engine_args.dtype = '{policy}', but trainer.training.dtype = '{trainer}'; "
            "their log-probs are compared, so make them equal"
        )
    dtype: str | None = trainer or policy
    return dtype


def _metrics(keys: ForgeKeys) -> dict[str, Any]:
    """Return section `metrics`; without an API key, W&B data stays in the run folder."""
    project = keys.get("metric_logging.wandb.project")
    if project is None:
        return {}
    mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    entity = keys.get("metric_logging.wandb.entity")
    return {"wandb": _drop_none({"project": project, "entity": entity, "mode": mode})}


def _add_gpus(tree: dict[str, Any], keys: ForgeKeys, *, has_gpu: bool) -> None:
    policy_has_gpus = keys.get("services.policy.with_gpus")
    trainer_has_gpus = keys.get("actors.trainer.with_gpus")
    if has_gpu and policy_has_gpus:
        tree["rollout"]["num_gpus_per_worker"] = tree["generator"].get("tensor_parallel_size", 1)
    if has_gpu and trainer_has_gpus:
        tree["learner"]["num_gpus_per_rank"] = 1


def _drop_none(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None; the preset provides the others."""
    return {key: value for key, value in section.items() if value is not None}
