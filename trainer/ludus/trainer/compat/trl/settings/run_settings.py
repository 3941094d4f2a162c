"""A GRPOConfig as the configuration of a run.

    rows of an optimizer step    R = per_device_train_batch_size * gradient_accumulation_steps
    rows of a generation batch   B = generation_batch_size
    groups of a batch            max(B, R) / num_generations
    optimizer steps of a pass    max(B, R) / R                      learner.num_minibatches
    passes over a batch          num_iterations                     learner.update_epochs

TRL counts optimizer steps, a run counts batches: `Batches` translates. As in TRL, whatever is
trained on was sampled by the newest weights (training.max_staleness = 0).
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ludus.proto.config.section import RUN_NAME_PATTERN
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.settings.config import GRPOConfig
from ludus.trainer.compat.trl.settings.sampling import check_sampling, correction, has_gpu, num_gpus
from ludus.trainer.rollout.engines.factory import has_vllm

DEFAULT_OUTPUT_DIR = "trainer_output"
_LOCAL_HOSTS = ("0.0.0.0", "127.0.0.1", "localhost")
_STRATEGIES = {
    "logging_steps": "logging_strategy",
    "save_steps": "save_strategy",
    "eval_steps": "eval_strategy",
}
_KEEP_ALL = 1_000_000
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_AGGREGATIONS = {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant"}
_SCALES = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}


@dataclass(frozen=True, slots=True)
class Batches:
    """How rows, prompts and steps of TRL's become batches of a run."""

    num_groups: int
    """Of a batch."""
    num_minibatches: int
    """Optimizer steps of a pass over a batch."""
    num_steps: int
    """Batches of the run."""
    num_prompts: int
    """Of the data set."""
    num_passes: int = 1
    """Over each batch."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps of a batch."""
        return self.num_minibatches * self.num_passes

    @property
    def num_optimizer_steps(self) -> int:
        """Of the whole run."""
        return self.num_steps * self.num_updates

    @property
    def per_epoch(self) -> float:
        """Batches in which every prompt comes once."""
        return self.num_prompts / self.num_groups

    def of_optimizer_steps(self, number: float) -> int:
        """The batches of so many optimizer steps, or of such a share of all, at least one."""
        wanted = number * self.num_optimizer_steps if number < 1 else number
        return max(1, round(wanted / self.num_updates))


def batches_of(args: GRPOConfig, num_prompts: int) -> Batches:
    """The batches of a training on so many prompts.

    Raises:
        ConfigError: sizes that do not fit each other, or fewer prompts than a batch has.
    """
    group = args.num_generations
    of_update = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows = max(_generated_at_once(args), of_update)
    if rows % of_update or rows % group or (rows // group) % (rows // of_update):
        raise ConfigError(
            f"GRPOConfig expected a generation batch of {rows} rows that holds whole optimizer "
            f"steps of per_device_train_batch_size * gradient_accumulation_steps = {of_update} "
            f"rows, and in each of them whole groups of num_generations = {group}; set "
            f"gradient_accumulation_steps or generation_batch_size to a multiple of {group}"
        )
    num_groups, num_minibatches = rows // group, rows // of_update
    if args.max_steps > 0:
        num_steps = math.ceil(args.max_steps / (num_minibatches * args.num_iterations))
    else:
        # As TRL does, the rows left at the end that fill no batch are not trained on.
        num_steps = math.floor(args.num_train_epochs * num_prompts / num_groups + 1e-9)
    if num_steps < 1:
        raise ConfigError(
            f"expected at least {num_groups} prompts, a generation batch of {rows} rows / "
            f"num_generations = {group}, got {num_prompts} for num_train_epochs = "
            f"{args.num_train_epochs:g}; add rows, or lower the batch"
        )
    return Batches(num_groups, num_minibatches, num_steps, num_prompts, args.num_iterations)


def run_settings(args: GRPOConfig, batches: Batches, max_tokens: int) -> dict[str, Any]:
    """The sections of the run, but for its environment and model.

    Args:
        max_tokens: of prompt and completion together.

    Raises:
        ConfigError: a field has a value that no run can have.
    """
    folder = run_folder(args)
    _check_intervals(args)
    check_sampling(args, max_tokens)
    return {
        "name": folder.name,
        "output_dir": str(folder.parent),
        "seed": args.seed,
        "generator": _generator(args),
        "rollout": _rollout(args, batches, max_tokens),
        "algorithm": _algorithm(args),
        "learner": _learner(args, batches),
        "training": _training(args, batches),
        "metrics": _metrics(args),
    }


def run_folder(args: GRPOConfig) -> Path:
    """The run's folder, which `output_dir` names.

    Raises:
        ConfigError: its last part can be no run's name.
    """
    folder = Path(args.output_dir or DEFAULT_OUTPUT_DIR).expanduser()
    if not re.fullmatch(RUN_NAME_PATTERN, folder.name):
        raise ConfigError(
            f"GRPOConfig.output_dir = '{args.output_dir}': its last part is the name of the run, "
            "expected up to 47 letters, digits, '.', '_' and '-', of which the first is a letter "
            "or a digit; rename it"
        )
    return folder


def server_port(args: GRPOConfig) -> int | None:
    """Where POST /generate/ is answered; None where TRL would start no server.

    Raises:
        ConfigError: the server is elsewhere.
    """
    if not args.use_vllm or _one_of(args, "vllm_mode", ("server", "colocate")) == "colocate":
        return None
    host, port = args.vllm_server_host, args.vllm_server_port
    if args.vllm_server_base_url is not None:
        host, port = _place_of(args.vllm_server_base_url, port)
    if host not in _LOCAL_HOSTS:
        raise ConfigError(
            f"GRPOConfig.vllm_server_host = {host!r} is not honoured here, expected one of "
            f"{list(_LOCAL_HOSTS)}: rollout workers generate, each on its own machine; leave it out"
        )
    return int(port)


def _place_of(url: str, port: int) -> tuple[str | None, int]:
    """The host that a URL names, and its port, which is `port` where it names none."""
    parts = urlsplit(url)
    try:
        return parts.hostname, parts.port or port
    except ValueError as error:
        raise ConfigError(f"GRPOConfig.vllm_server_base_url = '{url}': {error}") from None


def _generated_at_once(args: GRPOConfig) -> int:
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        raise ConfigError(
            "GRPOConfig expected generation_batch_size or steps_per_generation, got both; remove "
            "one of them"
        )
    of_device = args.per_device_train_batch_size
    rows = args.generation_batch_size
    if rows is None:
        return int(of_device * (args.steps_per_generation or args.gradient_accumulation_steps))
    if rows % of_device:
        raise ConfigError(
            f"GRPOConfig.generation_batch_size = {rows} expected a multiple of "
            f"per_device_train_batch_size = {of_device}; set it to one"
        )
    return int(rows)


def _generator(args: GRPOConfig) -> dict[str, Any]:
    if args.use_vllm and not has_vllm():
        sys.stderr.write(
            "note: GRPOConfig.use_vllm = True, and vLLM is not installed: rollout workers sample "
            "with transformers\n"
        )
    if not args.use_vllm or not has_vllm():
        return {"kind": "transformers"}
    return {
        "kind": "vllm",
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
    }


def _rollout(args: GRPOConfig, batches: Batches, max_tokens: int) -> dict[str, Any]:
    if args.max_completion_length is None:
        raise ConfigError(
            "GRPOConfig.max_completion_length expected a number of tokens, got None; set it"
        )
    return {
        "group_size": args.num_generations,
        "group_seed": "shared",
        "num_groups_in_flight": batches.num_groups,
        "num_gpus_per_worker": num_gpus(args) * (args.vllm_tensor_parallel_size or 1),
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": max(args.top_k or 0, 0),
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_completion_tokens": args.max_completion_length,
        "max_tokens": max_tokens,
        "generate_port": server_port(args),
    }


def _algorithm(args: GRPOConfig) -> dict[str, Any]:
    scale = _SCALES.get(args.scale_rewards)
    if scale is None:
        raise _unknown(args, "scale_rewards", _SCALES)
    loss, aggregation = _loss(args)
    return {
        "kind": "grpo",
        "baseline": "mean",
        "scale": scale,
        "credit": "episode",
        "zero_variance_groups": "keep",
        "loss": loss,
        "aggregation": aggregation,
        "correction": correction(args),
        "geometric_mask": None,
        "old_logprobs": "recompute",
        "entropy_coef": args.entropy_coef,
        "kl_coef": args.beta,
        # TRL's default weights k3 by the ratio, by which its gradient is that of the divergence on
        # average, as k2's is; without that weight it is k3 as it stands.
        "kl_estimator": "k2" if args.use_bias_correction_kl else "k3",
    }


def _loss(args: GRPOConfig) -> tuple[dict[str, Any], str]:
    """The loss, and how it is summed up."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    level = _one_of(args, "importance_sampling_level", ("token", "sequence"))
    if args.loss_type == "cispo":
        if level == "sequence" or args.delta is not None:
            raise ConfigError(
                "GRPOConfig.loss_type = 'cispo' expected importance_sampling_level = 'token' and "
                f"delta = None, got {level!r} and {args.delta}; leave both out, or take another "
                "loss_type"
            )
        return {"kind": "cispo", "clip_low": 1.0, "clip_high": max(high - 1, 1e-9)}, "token_mean"
    aggregation = _AGGREGATIONS.get(args.loss_type)
    if aggregation is None:
        raise _unknown(args, "loss_type", [*_AGGREGATIONS, "cispo"])
    clips = {"clip_low": args.epsilon, "clip_high": high}
    if level == "token":
        return {"kind": "clip", **clips, "dual_clip": args.delta}, aggregation
    if aggregation != "sequence_mean" or args.delta is not None:
        raise ConfigError(
            "GRPOConfig.importance_sampling_level = 'sequence' has one ratio per sequence, "
            f"expected loss_type = 'grpo' and delta = None, got {args.loss_type!r} and "
            f"{args.delta}; set both"
        )
    return {"kind": "gspo", **clips}, aggregation


def _learner(args: GRPOConfig, batches: Batches) -> dict[str, Any]:
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if schedule not in _SCHEDULES:
        raise _unknown(args, "lr_scheduler_type", _SCHEDULES)
    warmup = args.warmup_steps if schedule != "constant" else 0
    if 0 < warmup < 1:
        warmup = math.ceil(warmup * batches.num_optimizer_steps)
    if args.max_grad_norm is None:
        raise ConfigError(
            "GRPOConfig.max_grad_norm expected a number above 0, got None; set a large one for no "
            "clipping"
        )
    if args.learning_rate * args.weight_decay >= 1:
        raise ConfigError(
            f"GRPOConfig.weight_decay = {args.weight_decay:g} times learning_rate = "
            f"{args.learning_rate:g} is what each step takes off every weight, expected less than "
            "1; lower weight_decay, which is 0 to 0.1 as a rule"
        )
    is_reduced = args.bf16 if args.bf16 is not None else has_gpu(args)
    return {
        "learning_rate": args.learning_rate,
        "schedule": _SCHEDULES[schedule],
        "learning_rate_final": 0.0,
        "warmup_steps": int(warmup),
        "weight_decay": args.weight_decay,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "max_grad_norm": args.max_grad_norm,
        "num_minibatches": batches.num_minibatches,
        "update_epochs": batches.num_passes,
        "num_gpus_per_rank": num_gpus(args),
        "dtype": "bfloat16" if is_reduced else "float32",
        "activation_checkpointing": bool(args.gradient_checkpointing),
        "compile": bool(args.torch_compile),
    }


def _training(args: GRPOConfig, batches: Batches) -> dict[str, Any]:
    when = _one_of(args, "save_strategy", ("no", "steps", "epoch"))
    every = {
        # One more is written at the end.
        "no": batches.num_steps + 1,
        "epoch": max(1, round(batches.per_epoch)),
        "steps": batches.of_optimizer_steps(args.save_steps),
    }
    return {
        "num_steps": batches.num_steps,
        "groups_per_step": batches.num_groups,
        "max_staleness": 0,
        "checkpoint_every_steps": every[when],
        # As TRL does, a limit that is not above 0 limits nothing.
        "keep_checkpoints": max(args.save_total_limit or 0, 0) or _KEEP_ALL,
    }


def _check_intervals(args: GRPOConfig) -> None:
    for name, strategy in _STRATEGIES.items():
        steps = getattr(args, name)
        if steps is not None and steps <= 0 and getattr(args, strategy) == "steps":
            raise ConfigError(
                f"GRPOConfig.{name} = {steps} expected a number above 0 where {strategy} = "
                f"'steps'; raise it, or set {strategy} = 'no'"
            )


def _metrics(args: GRPOConfig) -> dict[str, Any]:
    named = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    wanted = {str(name) for name in named} - {"none"}
    unknown = sorted(wanted - {"wandb", "tensorboard"})
    if unknown:
        raise ConfigError(
            f"GRPOConfig.report_to = {args.report_to!r} expected 'none', 'wandb' or 'tensorboard', "
            f"got {unknown}; every run has metrics.jsonl, a report and `ludus watch` as well"
        )
    settings: dict[str, Any] = {"tensorboard": "tensorboard" in wanted}
    if "wandb" in wanted:
        settings["wandb"] = {"project": args.project}
    if args.log_completions:
        settings["transcripts_per_step"] = args.num_completions_to_print or args.num_generations
    return settings


def _one_of(args: GRPOConfig, name: str, known: tuple[str, ...]) -> str:
    value = getattr(args, name)
    value = str(getattr(value, "value", value))
    if value not in known:
        raise _unknown(args, name, known)
    return value


def _unknown(args: GRPOConfig, name: str, known: Any) -> ConfigError:
    return ConfigError(
        f"GRPOConfig.{name} = {getattr(args, name)!r} is not honoured here, expected one of "
        f"{list(known)}"
    )
