"""Checks for combinations of values that no run accepts, reported with Forge's key names.

Values in section `ludus` are checked when the run's configuration is read, with Ludus' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludus.proto.config.presets import apply_preset
from ludus.proto.config.section import MAX_VLLM_TEMPERATURE
from ludus.proto.errors import ConfigError


def check_combinations(tree: Mapping[str, Any], ludus_section: Mapping[str, Any]) -> None:
    """Check combinations that the run would otherwise refuse under Ludus' names.

    Args:
        tree: the sections of a run, mapped from Forge's keys.
        ludus_section: the content of section `ludus`.

    Raises:
        ConfigError: values cannot be combined.
    """
    tree = apply_preset(tree)
    if "learner" not in ludus_section:
        _check_decay(tree["learner"])
    if ludus_section.keys().isdisjoint({"rollout", "generator"}):
        _check_lengths(tree["rollout"])
        _check_engine(tree["generator"], tree["rollout"])


def _check_decay(learner: Mapping[str, Any]) -> None:
    rate, decay = learner["learning_rate"], learner["weight_decay"]
    if rate * decay >= 1:
        raise ConfigError(
            f"trainer.optimizer.weight_decay = {decay:g} times trainer.optimizer.lr = {rate:g} is "
            "the share of every weight that a step removes and must be less than 1; lower "
            "weight_decay, which is usually 0 to 0.1"
        )


def _check_lengths(rollout: Mapping[str, Any]) -> None:
    max_completion, max_tokens = rollout["max_completion_tokens"], rollout["max_tokens"]
    if max_completion >= max_tokens:
        raise ConfigError(
            f"max_res_tokens = {max_completion} leaves no room for a prompt in max_seq_len = "
            f"{max_tokens}; lower max_res_tokens or raise max_seq_len"
        )


def _check_engine(generator: Mapping[str, Any], rollout: Mapping[str, Any]) -> None:
    if generator["kind"] != "vllm":
        return
    max_model_tokens, num_gpus = (
        generator.get("max_model_tokens"),
        generator.get("tensor_parallel_size", 1),
    )
    if max_model_tokens is not None and max_model_tokens < rollout["max_tokens"]:
        raise ConfigError(
            f"policy.engine_args.max_model_len = {max_model_tokens} is less than the "
            f"{rollout['max_tokens']} tokens of an episode, from max_req_tokens and max_res_tokens "
            "or max_seq_len; raise or remove max_model_len, or lower the others"
        )
    if rollout["temperature"] > MAX_VLLM_TEMPERATURE:
        raise ConfigError(
            f"policy.sampling_params.temperature = {rollout['temperature']:g}, but vLLM allows "
            f"at most {MAX_VLLM_TEMPERATURE:g}; lower it"
        )
    if num_gpus > 1 and rollout.get("num_gpus_per_worker") != num_gpus:
        raise ConfigError(
            f"policy.engine_args.tensor_parallel_size = {num_gpus} needs that number of "
            "GPUs, but services.policy.with_gpus is not true; set it to true"
        )
