"""Values of Forge's keys that no run can have together, told by those keys.

What section `ludus` says of the same parts is told by the names of a run, when that is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludus.proto.config.presets import apply_preset
from ludus.proto.config.section import MAX_VLLM_TEMPERATURE
from ludus.proto.errors import ConfigError


def check_together(tree: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check what the sections of a run would refuse by names that nobody has typed.

    Args:
        tree: the sections, as Forge's keys say them.
        own: what section `ludus` says.

    Raises:
        ConfigError: values that do not go together.
    """
    tree = apply_preset(tree)
    if "learner" not in own:
        _check_decay(tree["learner"])
    if own.keys().isdisjoint({"rollout", "generator"}):
        _check_lengths(tree["rollout"])
        _check_engine(tree["generator"], tree["rollout"])


def _check_decay(learner: Mapping[str, Any]) -> None:
    rate, decay = learner["learning_rate"], learner["weight_decay"]
    if rate * decay >= 1:
        raise ConfigError(
            f"trainer.optimizer.weight_decay = {decay:g} times trainer.optimizer.lr = {rate:g} is "
            "what each step takes off every weight, expected less than 1; lower weight_decay, "
            "which is 0 to 0.1 as a rule"
        )


def _check_lengths(rollout: Mapping[str, Any]) -> None:
    answer, longest = rollout["max_completion_tokens"], rollout["max_tokens"]
    if answer >= longest:
        raise ConfigError(
            f"max_res_tokens = {answer} leaves no room for a prompt in max_seq_len = {longest}; "
            "lower the one or raise the other"
        )


def _check_engine(generator: Mapping[str, Any], rollout: Mapping[str, Any]) -> None:
    if generator["kind"] != "vllm":
        return
    longest, num_gpus = generator.get("max_model_tokens"), generator.get("tensor_parallel_size", 1)
    if longest is not None and longest < rollout["max_tokens"]:
        raise ConfigError(
            f"policy.engine_args.max_model_len = {longest} is less than the "
            f"{rollout['max_tokens']} tokens of a game, by max_req_tokens and max_res_tokens, or "
            "max_seq_len; raise the one, lower the others, or leave max_model_len out"
        )
    if rollout["temperature"] > MAX_VLLM_TEMPERATURE:
        raise ConfigError(
            f"policy.sampling_params.temperature = {rollout['temperature']:g}, but vLLM samples at "
            f"{MAX_VLLM_TEMPERATURE:g} at most; lower it"
        )
    if num_gpus > 1 and rollout.get("num_gpus_per_worker") != num_gpus:
        raise ConfigError(
            f"policy.engine_args.tensor_parallel_size = {num_gpus} spreads a model over as many "
            "GPUs, but services.policy.with_gpus is not true; set it to true"
        )
