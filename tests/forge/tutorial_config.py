"""Configuration of Forge's blackjack tutorial."""

from __future__ import annotations

from typing import Any

_NO_PARALLELISM = {
    f"{kind}_degree": 1
    for kind in (
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "expert_parallel",
    )
}
_QWEN = {"name": "qwen3", "flavor": "1.7B", "hf_assets_path": "hf://${model}"}
_HUB_CHECKPOINT = {"enable": True, "initial_load_path": "hf://${model}", "initial_load_in_hf": True}


def _make_process_options(name: str, *, gpu: bool = False) -> dict[str, Any]:
    return {"procs": 1, "num_replicas": 1, "mesh_name": name, "with_gpus": gpu}


def _make_trainer() -> dict[str, Any]:
    return {
        "model": dict(_QWEN),
        "optimizer": {"name": "AdamW", "lr": "1e-5", "eps": "1e-8"},
        "lr_scheduler": {"warmup_steps": 1},
        "training": {
            "local_batch_size": "${local_batch_size}",
            "seq_len": 1024,
            "max_norm": 1.0,
            "steps": 1000,
            "dtype": "bfloat16",
            "gc_freq": 1,
        },
        "compile": {"enable": False},
        "parallelism": {**_NO_PARALLELISM, "disable_loss_parallel": True},
        "checkpoint": {
            **_HUB_CHECKPOINT,
            "last_save_in_hf": True,
            "interval": 500,
            "async_mode": "disabled",
        },
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    }


def _make_reference() -> dict[str, Any]:
    return {
        "model": dict(_QWEN),
        "training": {
            "seq_len": "${trainer.training.seq_len}",
            "dtype": "bfloat16",
            "gc_freq": 1,
        },
        "compile": {"enable": False},
        "parallelism": dict(_NO_PARALLELISM),
        "checkpoint": dict(_HUB_CHECKPOINT),
    }


def tutorial_config() -> dict[str, Any]:
    """Return the configuration. Numbers like `1e-5` are strings, as YAML loads them."""
    return {
        "group_size": 4,
        "local_batch_size": 8,
        "max_req_tokens": 512,
        "max_res_tokens": 32,
        "model": "Qwen/Qwen3-1.7B",
        "off_by_n": 1,
        "rollout_threads": 1,
        "metric_logging": {
            "wandb": {
                "project": "blackjack-grpo-tutorial",
                "group": "blackjack_exp_${oc.env:USER}",
                "reduce_across_ranks": True,
            },
            "console": {"reduce_across_ranks": True},
        },
        "blackjack_env": {"server_url": "http://localhost:8004", "model": "${model}"},
        "policy": {
            "engine_args": {
                "model": "${model}",
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "enforce_eager": False,
            },
            "sampling_params": {
                "n": 1,
                "max_tokens": "${max_res_tokens}",
                "temperature": 1.0,
                "top_p": 1.0,
            },
        },
        "trainer": _make_trainer(),
        "replay_buffer": {
            "batch_size": "${local_batch_size}",
            "max_policy_age": "${off_by_n}",
            "dp_size": "${trainer.parallelism.data_parallel_shard_degree}",
        },
        "ref_model": _make_reference(),
        "services": {
            "policy": {
                **_make_process_options("policy", gpu=True),
                "procs": "${policy.engine_args.tensor_parallel_size}",
            },
            "ref_model": _make_process_options("ref_model", gpu=True),
            "reward_actor": _make_process_options("reward_actor"),
        },
        "actors": {
            name: {"procs": 1, "with_gpus": name == "trainer", "mesh_name": name}
            for name in ("blackjack_env", "trainer", "replay_buffer", "compute_advantages")
        },
    }
