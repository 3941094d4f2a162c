"""Runs that certainly run out of memory are refused; the settings in the message make them fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import LlamaConfig

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.__main__ import main
from ludus.trainer.setup.memory.machine import read_machine
from ludus.trainer.setup.memory.refusals import check_memory

GPU_LEARNER = {"num_gpus_per_rank": 1, "dtype": "bfloat16"}
HALF = {"dtype": "bfloat16"}
VLLM = {"kind": "vllm", "gpu_memory_utilization": 0.5}
GPU_ROLLOUT = {"num_gpus_per_worker": 1}
LORA = {"lora": {"rank": 16}}
PPO = {"kind": "ppo", "critic": {"kind": "model"}}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the configuration of a model of 7.6 billion parameters, without weights.

    The model has few, wide layers, so that its skeleton is built quickly.
    """
    folder: Path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=32_000,
        hidden_size=8192,
        intermediate_size=65_536,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    return str(folder)


class Case(NamedTuple):
    """A run that does not fit, and changes with which it does."""

    sections: dict[str, Any]
    message: str
    """Pattern of the message."""
    changes: dict[str, Any]
    """Settings that replace those in `sections`."""
    is_local: bool = True


def make_placement(gpu_gib: float | None = None, node_gib: float = 1000) -> dict[str, float | None]:
    return {"gpu_memory_gib": gpu_gib, "node_memory_gib": node_gib}


def learn(**fields: Any) -> dict[str, Any]:
    return {**GPU_LEARNER, **fields}


def generate(**fields: Any) -> dict[str, Any]:
    return {**VLLM, **fields}


CASES = {
    "one rank": Case(
        {"learner": learn(), "placement": make_placement(80)},
        r"each learner rank needs at least 11\d\.\d GiB.*a GPU has 80\.0 GiB.*num_ranks to at "
        "least 2$",
        {"learner": learn(num_ranks=2)},
    ),
    "adapters": Case(
        {"learner": learn(), "placement": make_placement(80)},
        "each learner rank needs at least",
        {"model": LORA},
    ),
    "small GPUs": Case(
        {"learner": learn(num_ranks=4), "placement": make_placement(24)},
        r"a GPU has 24\.0 GiB; set learner\.num_ranks to at least 6$",
        {"learner": learn(num_ranks=6)},
    ),
    "reference model": Case(
        {
            "learner": learn(num_ranks=2),
            "algorithm": {"kl_coef": 0.1},
            "placement": make_placement(64),
        },
        r"set learner\.offload_reference = true$",
        {"learner": learn(num_ranks=2, offload_reference=True)},
    ),
    "critic": Case(
        {"learner": learn(num_ranks=2), "algorithm": PPO, "placement": make_placement(80)},
        "set learner.num_ranks to at least 3$",
        {"learner": learn(num_ranks=3)},
    ),
    "share of vLLM": Case(
        {
            "learner": HALF,
            "generator": generate(gpu_memory_utilization=0.1),
            "rollout": GPU_ROLLOUT,
            "placement": make_placement(80),
        },
        r"gpu_memory_utilization = 0\.1 gives vLLM 8\.0 GiB.*raise "
        r"generator\.gpu_memory_utilization above 0\.18$",
        {"generator": generate(gpu_memory_utilization=0.19)},
    ),
    "weights of vLLM": Case(
        {
            "learner": HALF,
            "generator": VLLM,
            "rollout": GPU_ROLLOUT,
            "placement": make_placement(12),
        },
        r"raise generator\.tensor_parallel_size, now 1$",
        {
            "generator": generate(tensor_parallel_size=4),
            "rollout": {"num_gpus_per_worker": 4},
        },
    ),
    "cache of a sequence": Case(
        {
            "learner": HALF,
            "generator": generate(kv_cache_gib=1),
            "rollout": {**GPU_ROLLOUT, "max_tokens": 131_072},
            "placement": make_placement(80),
        },
        r"kv_cache_gib = 1, but vLLM needs 2\.0 GiB for one sequence of 131072 tokens; set "
        r"generator\.kv_cache_gib = 2, or lower rollout\.max_tokens$",
        {"generator": generate(kv_cache_gib=2)},
    ),
    "cache and weights": Case(
        {
            "learner": HALF,
            "generator": generate(kv_cache_gib=70),
            "rollout": GPU_ROLLOUT,
            "placement": make_placement(80),
        },
        r"each rollout worker needs at least 84\.1 GiB.*lower generator\.kv_cache_gib = 70",
        {"generator": generate(kv_cache_gib=60)},
    ),
    "transformers": Case(
        {
            "learner": HALF,
            "generator": {"kind": "transformers"},
            "rollout": GPU_ROLLOUT,
            "placement": make_placement(12),
        },
        r"each rollout worker needs at least 14\.1 GiB.*generator\.kind = 'vllm'",
        {"placement": make_placement(24)},
    ),
    "shared GPU": Case(
        {
            "learner": learn(num_gpus_per_rank=0.5),
            "generator": VLLM,
            "rollout": {"num_gpus_per_worker": 0.5},
            "placement": make_placement(140),
        },
        r"share a GPU of 140\.0 GiB.*set generator\.gpu_memory_utilization = 0\.\d+ or less$",
        {"generator": generate(gpu_memory_utilization=0.13)},
    ),
    "publication": Case(
        {"learner": learn(num_ranks=8), "placement": make_placement(80, node_gib=32)},
        r"the learner needs at least 42\.\d GiB and the rollout workers 14\.\d GiB of main memory, "
        r"but this machine has 32\.0 GiB",
        {"model": LORA},
    ),
    "publication in a cluster": Case(
        {"learner": learn(num_ranks=8), "placement": make_placement(80, node_gib=32)},
        r"a node has 32\.0 GiB.*set placement\.node_memory_gib$",
        {"placement": make_placement(80, node_gib=64)},
        is_local=False,
    ),
    "learner in main memory": Case(
        {"placement": make_placement(node_gib=64)},
        r"the learner needs at least 11\d\.\d GiB.*this machine has 64\.0 GiB; train adapters",
        {"model": LORA, "placement": make_placement(node_gib=96)},
    ),
    "workers in main memory": Case(
        {
            "placement": make_placement(node_gib=140),
            "rollout": {"num_workers": 2, "min_workers": 2},
        },
        r"and the rollout workers 56\.\d GiB of main memory",
        {
            "rollout": {"num_workers": 1, "min_workers": 1},
            "placement": make_placement(node_gib=160),
        },
    ),
}


def make_run(model_path: str, sections: dict[str, Any]) -> LanguageModelRun:
    model = {"kind": "pretrained", "path": model_path, **sections.get("model", {})}
    rollout = {"num_groups_in_flight": 1, **sections.get("rollout", {})}
    return LanguageModelRun.model_validate({**sections, "model": model, "rollout": rollout})


def check(run: LanguageModelRun, *, is_local: bool = True) -> Any:
    return check_memory(run, read_machine(run.placement, is_local=is_local, uses_gpus=True))


@pytest.mark.parametrize("name", CASES)
def test_run_that_cannot_fit_is_refused_with_the_remedy(model_path: str, name: str) -> None:
    case = CASES[name]
    with pytest.raises(ConfigError, match=case.message):
        check(make_run(model_path, case.sections), is_local=case.is_local)


@pytest.mark.parametrize("name", CASES)
def test_run_with_the_remedy_is_accepted(model_path: str, name: str) -> None:
    case = CASES[name]
    plan = check(make_run(model_path, {**case.sections, **case.changes}), is_local=case.is_local)
    assert [use.owner for use in plan.uses][-1] == "node"
    assert all(use.num_bytes > 0 for use in plan.uses)


def test_micro_batch_is_chosen_to_fit_and_a_set_number_is_kept(model_path: str) -> None:
    def choose(gpu_gib: float | None, **fields: Any) -> int:
        learner = learn(num_ranks=2, **fields)
        rollout = {"max_tokens": 1024, "group_size": 64}
        sections = {"learner": learner, "rollout": rollout, "placement": make_placement(gpu_gib)}
        plan = check(make_run(model_path, sections), is_local=False)
        return int(plan.max_tokens_per_micro_batch)

    assert choose(None) == choose(1000) == 16384
    sizes = [choose(gpu_gib) for gpu_gib in (80, 96, 128)]
    assert 1024 <= sizes[0] < sizes[1] <= sizes[2] <= 16384
    assert choose(96, activation_checkpointing=True) > sizes[1]
    assert choose(80, max_tokens_per_micro_batch=12345) == 12345


def test_estimate_of_a_rank_with_a_chosen_micro_batch_fits(model_path: str) -> None:
    sections = {"learner": learn(num_ranks=2), "placement": make_placement(96)}
    plan = check(make_run(model_path, {**sections, "rollout": {"max_tokens": 1024}}))
    assert plan.max_tokens_per_micro_batch < 16384
    assert plan.uses[0].fits


def test_micro_batch_has_no_more_tokens_than_a_step(model_path: str) -> None:
    sections = {
        "rollout": {"max_tokens": 64, "group_size": 4},
        "training": {"groups_per_step": 2},
        "placement": make_placement(node_gib=1000),
    }
    [rank, *_] = check(make_run(model_path, sections)).uses
    assert "activations of 512 tokens" in {part.name for part in rank.parts}


def test_need_that_may_not_fit_is_marked_with_a_remedy(model_path: str) -> None:
    learner = learn(num_ranks=2, max_tokens_per_micro_batch=65536)
    sections = {"learner": learner, "placement": make_placement(80)}
    rollout = {"max_tokens": 4096, "group_size": 64}
    [rank, *_] = check(make_run(model_path, {**sections, "rollout": rollout})).uses
    assert not rank.fits
    assert "activation_checkpointing = true" in rank.remedy
    assert "max_tokens_per_micro_batch = 32768" in rank.remedy


def test_tiny_model_needs_no_files() -> None:
    run = LanguageModelRun.model_validate({"placement": make_placement(node_gib=100)})
    plan = check(run)
    assert plan.max_tokens_per_micro_batch == 16384
    assert plan.uses[0].num_bytes < 2**30


def test_check_and_start_refuse_with_the_same_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = LanguageModelRun.model_validate(
        {"output_dir": str(tmp_path / "runs"), "placement": make_placement(node_gib=0.001)}
    )
    config = tmp_path / "run.json"
    config.write_text(run.model_dump_json(), "utf-8")
    messages = []
    for command in ("check", "train"):
        assert main([command, "--config", str(config)]) == 2
        messages.append(capsys.readouterr().err)
    assert messages[0] == messages[1]
    assert re.search(r"error: the learner needs at least .* has 1 MiB", messages[0])
    assert not (tmp_path / "runs").exists()
