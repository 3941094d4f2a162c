"""A configuration of Forge's as a run of Ludus: what each of its keys means here, if anything.

    group_size, local_batch_size, dp_size   -> rollout.group_size, training.groups_per_step
    max_req_tokens, max_res_tokens          -> rollout.max_tokens, rollout.max_completion_tokens
    off_by_n                                -> training.max_staleness
    rollout_threads, services.policy        -> rollout.num_groups_in_flight, rollout.num_workers
    model                                   -> model.path; "tiny" is made on the spot
    blackjack_env.server_url                -> environment.address
    policy                                  -> generator, rollout.temperature, rollout.top_p
    trainer                                 -> learner, training.num_steps, checkpoints
    ludus                                   -> laid over all of that, in the words of Ludus

What Forge's files leave to its code (its algorithm, with a pull of 0.1 to the starting policy) is
preset "torchforge".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludus.proto.config.presets import merge_sections
from ludus.proto.errors import ConfigError, did_you_mean
from ludus.trainer.compat.forge.combinations import check_together
from ludus.trainer.compat.forge.configuration import ForgeConfig, Leaves
from ludus.trainer.compat.forge.known_keys import known_keys
from ludus.trainer.compat.forge.values import ALL, ONE_WAY_DEGREES

OWN_SECTION = "ludus"
"""Fields of a run of Ludus, which stand wherever both say something."""
TINY = "tiny"
_HUB = "hf://"
_FOREVER = 1_000_000
"""Steps of a file that names none: as many as Forge's own files say."""
_GROUP_SIZE, _MAX_REQUEST, _MAX_RESPONSE = 4, 512, 32
"""Where the file says nothing."""
_NUM_GAMES = 1_000
"""Of the evaluation after the last step, of which Forge has none."""
_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty")
"""Of vLLM's parameters those that rollouts have under the same names."""
_DONE_ANYWAY = (
    "trainer.checkpoint.initial_load_in_hf",
    "trainer.checkpoint.last_save_in_hf",
    "ref_model.checkpoint.enable",
    "ref_model.checkpoint.initial_load_in_hf",
)
"""Models are read and written in the format of Hugging Face, and the reference is the policy's."""
_ONE_WAY = "one group of processes shards the model over its ranks (data_parallel_shard_degree)"


@dataclass(frozen=True, slots=True)
class Mapped:
    """What a configuration of Forge's comes to."""

    tree: dict[str, Any]
    """Of a run's sections."""
    unused: tuple[str, ...]
    """Forge's keys that are set, and mean nothing here."""


def run_tree(config: ForgeConfig, *, name: str, has_gpu: bool) -> Mapped:
    """The sections of a run, and the keys that are not honoured.

    Args:
        name: of the run.
        has_gpu: decides for vLLM where section `ludus` does not; on a CPU, transformers is faster
            for small models.

    Raises:
        ConfigError: a key that Forge does not have, or a value that means something which no run
            of Ludus does.
    """
    leaves = Leaves(config, apart=OWN_SECTION)
    _check_names(leaves)
    _refuse_other_parallelism(leaves)
    _refuse_other_optimizers(leaves)
    environment = _environment(leaves)
    rollout, training = _sizes(leaves)
    own = config.get(OWN_SECTION) or {}
    engine = (own.get("generator") or {}).get("kind") or ("vllm" if has_gpu else "transformers")
    tree: dict[str, Any] = {
        "preset": "torchforge",
        "name": name,
        "model": _model(leaves, rollout["max_tokens"]),
        "generator": _generator(leaves, engine),
        "rollout": rollout,
        "learner": _learner(leaves),
        "training": training,
        "metrics": _metrics(leaves),
        "eval": {"num_games": _NUM_GAMES, "num_games_during": 0},
    }
    _add_gpus(tree, leaves, has_gpu=has_gpu)
    check_together(tree, own)
    if "environments" not in own:
        tree["environment"] = environment
        if "address" not in environment and "environment" not in own:
            raise ConfigError(
                "blackjack_env.server_url is not set, so nothing says where episodes are played; "
                "set it to the address of a server, or write a section ludus.environment"
            )
    return Mapped(merge_sections(tree, own), tuple(leaves.unasked))


def _check_names(leaves: Leaves) -> None:
    known = known_keys()
    unknown = [key for key in leaves if key not in known and not _is_empty(key, leaves, known)]
    if not unknown:
        return
    lines = [f"  {key}: {_hint(key, known)}" for key in unknown]
    raise ConfigError("expected keys of Forge's configuration, got\n" + "\n".join(lines))


def _is_empty(key: str, leaves: Leaves, known: frozenset[str]) -> bool:
    """Whether it is a section of which the file holds the name alone."""
    return _is_section(key, known) and leaves.get(key) is None


def _is_section(key: str, known: frozenset[str]) -> bool:
    return key == OWN_SECTION or any(one.startswith(f"{key}.") for one in known)


def _hint(key: str, known: frozenset[str]) -> str:
    if _is_section(key, known):
        return "expected a section with keys of its own, got a value"
    section = key.rpartition(".")[0]
    beside = [name for name in known if name.rpartition(".")[0] == section]
    said = did_you_mean(key, beside or known)
    return f"unknown{', ' + said if said else ''}; fields of Ludus stand in section {OWN_SECTION}"


def _refuse_other_parallelism(leaves: Leaves) -> None:
    for degree in ONE_WAY_DEGREES:
        _must_be_one(leaves, degree, _ONE_WAY)
    for name in ("engine_args", "engine_config"):
        way = "an engine spreads over GPUs by tensor_parallel_size"
        _must_be_one(leaves, f"policy.{name}.pipeline_parallel_size", way)


def _must_be_one(leaves: Leaves, key: str, way: str) -> None:
    value = leaves.whole(key)
    if value not in (None, 1):
        raise ConfigError(f"{key} = {value}: expected 1, because here {way}; set it to 1")


def _refuse_other_optimizers(leaves: Leaves) -> None:
    name = leaves.get("trainer.optimizer.name")
    if name not in (None, "AdamW"):
        raise ConfigError(f"trainer.optimizer.name = '{name}': expected AdamW; set it to that")


def _environment(leaves: Leaves) -> dict[str, Any]:
    environment = {
        "kind": "remote",
        "address": leaves.get("blackjack_env.server_url") or None,
        "max_turns": leaves.whole("blackjack_env.max_turns"),
    }
    leaves.get("blackjack_env.game_name")  # compared with what the server plays, when it is asked
    return _said(environment)


def _sizes(leaves: Leaves) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sections `rollout` and `training`."""
    group_size = leaves.count("group_size", "grpo.group_size", default=_GROUP_SIZE)
    per_rank = leaves.count(
        "replay_buffer.batch_size",
        "trainer.training.local_batch_size",
        "local_batch_size",
        "batch_size",
        default=group_size,
    )
    num_ranks = _num_ranks(leaves)
    dp_size = leaves.whole("replay_buffer.dp_size")
    if dp_size not in (None, ALL, num_ranks):
        raise ConfigError(
            f"replay_buffer.dp_size = {dp_size}, but the trainer has {num_ranks} data-parallel "
            "ranks; make them equal"
        )
    groups, rest = divmod(per_rank * num_ranks, group_size)
    if rest or not groups:
        raise ConfigError(
            f"local_batch_size = {per_rank} on {num_ranks} ranks is no multiple of group_size = "
            f"{group_size}: a step trains on whole groups; set it to one, for example "
            f"{max(1, groups) * group_size}"
        )
    answer = leaves.whole("max_res_tokens")
    longest = leaves.whole("blackjack_env.max_seq_len", "max_seq_len")
    if longest is None:
        asked = leaves.count("max_req_tokens", default=_MAX_REQUEST)
        longest = asked + (answer or _MAX_RESPONSE)
    _refuse_other_groups(leaves, group_size)
    sampling = _sampling(leaves, answer, longest)
    threads = leaves.count("rollout_threads", default=1)
    rollout = {
        "group_size": group_size,
        "num_groups_in_flight": max(threads, groups),
        "num_workers": leaves.whole("services.policy.num_replicas"),
        "max_tokens": _fitting(longest, leaves),
        **sampling,
    }
    max_age = leaves.whole("replay_buffer.max_policy_age", "off_by_n")
    steps = leaves.whole("trainer.training.steps")
    steps = _FOREVER if steps in (None, ALL) else steps
    training = {"num_steps": steps, "groups_per_step": groups, "max_staleness": max_age}
    return _said(rollout), _said({**training, **_checkpoints(leaves, steps)})


def _checkpoints(leaves: Leaves, steps: int) -> dict[str, Any]:
    """When a run writes checkpoints, which it does at its end in any case."""
    leaves.take_where_true(*_DONE_ANYWAY)
    interval, kept = (
        leaves.whole(f"trainer.checkpoint.{n}") for n in ("interval", "keep_latest_k")
    )
    if leaves.get("trainer.checkpoint.enable") is False:
        interval = steps + 1
    return {
        "checkpoint_every_steps": interval,
        "keep_checkpoints": _FOREVER if kept == 0 else kept,
    }


def _refuse_other_groups(leaves: Leaves, group_size: int) -> None:
    """An answer for each game of a group, whether Forge asks for all of them at once or not."""
    num = leaves.whole(*(f"policy.{name}.n" for name in ("sampling_params", "sampling_config")))
    if num not in (None, 1, group_size):
        raise ConfigError(
            f"policy.sampling_params.n = {num}: expected 1, or group_size = {group_size}, which "
            "says how many games a group has; make it one of them"
        )


def _sampling(leaves: Leaves, answer: int | None, longest: int) -> dict[str, Any]:
    names = [f"policy.{name}" for name in ("sampling_params", "sampling_config")]
    most = leaves.whole(*(f"{name}.max_tokens" for name in names))
    if most is not None and most >= longest:
        # An answer may be as long as the whole game: half of it is left for what is shown.
        most = answer or longest // 2
    if answer is not None and most not in (None, answer):
        raise ConfigError(
            f"{names[0]}.max_tokens = {most}, but max_res_tokens = {answer}; make them equal"
        )
    top_k = leaves.whole(*(f"{name}.top_k" for name in names))
    return {
        "max_completion_tokens": answer or most or longest // 2,
        "top_k": 0 if top_k == ALL else top_k,
        **{key: leaves.get(*(f"{name}.{key}" for name in names)) for key in _SAMPLING},
    }


def _fitting(longest: int, leaves: Leaves) -> int:
    """The length of an episode, which the trainer must be able to take."""
    limit = leaves.whole("trainer.training.seq_len")
    if limit is not None and limit < longest:
        raise ConfigError(
            f"trainer.training.seq_len = {limit} is less than the {longest} tokens of "
            "max_seq_len, or of max_req_tokens and max_res_tokens; raise the one or lower the "
            "others"
        )
    return longest


def _num_ranks(leaves: Leaves) -> int:
    shards = leaves.whole("trainer.parallelism.data_parallel_shard_degree")
    processes = leaves.count("actors.trainer.procs", default=1)
    if shards is None or shards == ALL:
        return processes
    if "actors.trainer.procs" in leaves and processes != shards:
        raise ConfigError(
            f"actors.trainer.procs = {processes}, but trainer.parallelism."
            f"data_parallel_shard_degree = {shards}: each rank is a process; make them equal"
        )
    return shards


def _model(leaves: Leaves, longest: int) -> dict[str, Any]:
    keys = (
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
    named = {key: _path(leaves.get(key)) for key in keys if leaves.get(key) is not None}
    if len(set(named.values())) > 1:
        said = ", ".join(f"{key} = '{path}'" for key, path in named.items())
        raise ConfigError(
            f"expected one model, got several: {said}; policy, trainer and reference begin as the "
            "same model here: name it once"
        )
    path = next(iter(named.values()), TINY)
    if path == TINY:
        return {"kind": "tiny", "max_tokens": longest}
    return {"kind": "pretrained", "path": path}


def _path(name: str) -> str:
    return name.removeprefix(_HUB)


def _generator(leaves: Leaves, kind: str) -> dict[str, Any]:
    if kind != "vllm":
        return {"kind": kind}

    def engine(name: str) -> Any:
        return leaves.get(f"policy.engine_args.{name}", f"policy.engine_config.{name}")

    vllm = {
        "kind": "vllm",
        "tensor_parallel_size": engine("tensor_parallel_size"),
        "enforce_eager": engine("enforce_eager"),
        "gpu_memory_utilization": engine("gpu_memory_utilization"),
        "max_num_seqs": engine("max_num_seqs"),
        "max_model_tokens": engine("max_model_len"),
    }
    return _said(vllm)


def _learner(leaves: Leaves) -> dict[str, Any]:
    def said(name: str) -> Any:
        return leaves.get(f"trainer.{name}")

    rate, floor = (
        leaves.number(f"trainer.{name}") for name in ("optimizer.lr", "lr_scheduler.min_lr_factor")
    )
    first, second = (leaves.number(f"trainer.optimizer.{name}") for name in ("beta1", "beta2"))
    mode = said("activation_checkpoint.mode")
    return _said(
        {
            "num_ranks": _num_ranks(leaves),
            "learning_rate": rate,
            "learning_rate_final": rate * floor if rate and floor else None,
            "schedule": said("lr_scheduler.decay_type"),
            "warmup_steps": said("lr_scheduler.warmup_steps"),
            "eps": said("optimizer.eps"),
            "betas": _betas(first, second),
            "weight_decay": said("optimizer.weight_decay"),
            "max_grad_norm": said("training.max_norm"),
            "dtype": _dtype(leaves),
            "activation_checkpointing": None if mode is None else mode != "none",
            "compile": said("compile.enable"),
        }
    )


def _betas(first: float | None, second: float | None) -> list[float] | None:
    """AdamW's, of which the file may say one; None where it says neither."""
    if first is None and second is None:
        return None
    return [0.9 if first is None else first, 0.95 if second is None else second]


def _dtype(leaves: Leaves) -> str | None:
    """The one in which trainer and policy compute."""
    trainer = leaves.get("trainer.training.dtype")
    policy = leaves.get("policy.engine_args.dtype", "policy.engine_config.dtype")
    if policy == "auto":
        policy = None
    if None not in (trainer, policy) and trainer != policy:
        raise ConfigError(
            f"policy.engine_args.dtype = '{policy}', but trainer.training.dtype = '{trainer}': "
            "log-probs of the two are compared; make them equal"
        )
    dtype: str | None = trainer or policy
    return dtype


def _metrics(leaves: Leaves) -> dict[str, Any]:
    """Section `metrics`: without a key, what W&B would get is kept in the run's folder."""
    project = leaves.get("metric_logging.wandb.project")
    if project is None:
        return {}
    mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    entity = leaves.get("metric_logging.wandb.entity")
    return {"wandb": _said({"project": project, "entity": entity, "mode": mode})}


def _add_gpus(tree: dict[str, Any], leaves: Leaves, *, has_gpu: bool) -> None:
    wanted = {
        name: leaves.get(name) for name in ("services.policy.with_gpus", "actors.trainer.with_gpus")
    }
    if not has_gpu:
        return
    if wanted["services.policy.with_gpus"]:
        tree["rollout"]["num_gpus_per_worker"] = tree["generator"].get("tensor_parallel_size", 1)
    if wanted["actors.trainer.with_gpus"]:
        tree["learner"]["num_gpus_per_rank"] = 1


def _said(section: Mapping[str, Any]) -> dict[str, Any]:
    """What is not None: the rest is the preset's to say."""
    return {key: value for key, value in section.items() if value is not None}
