"""Write docs/memory.md from the formulas for memory, or check it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from generated_page import make_table, write_or_check_page
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from ludus.proto.config import LanguageModelRun, PretrainedModel, load_run_config
from ludus.proto.memory_plan import MemoryPlan
from ludus.services.numbers import format_memory
from ludus.trainer.setup.memory import plan
from ludus.trainer.setup.memory.learner import LAYER_OBJECT_BYTES, OBJECT_BYTES, RankMemory
from ludus.trainer.setup.memory.machine import GIB, Machine
from ludus.trainer.setup.memory.refusals import find_problem
from ludus.trainer.setup.memory.shape import ModelShape, measure_skeleton
from ludus.trainer.setup.memory.worker import WorkerMemory

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "learner_memory.json"
VALUES = ROOT / "charts" / "ludus" / "values-gpu.yaml"
GPU_GIB, NUM_RANKS_IN_TABLE = 80, (1, 2, 4, 8, 16, 32, 64)
MAX_TOKENS = 4096
LOCAL_GPU_MACHINE = Machine(GPU_GIB * GIB, 256 * GIB, is_whole_run=True, has_several_gpus=True)
LOCAL_CPU_MACHINE = Machine(None, 32 * GIB, is_whole_run=True)

SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)


def make_qwen3(
    width: int, intermediate: int, num_layers: int, num_heads: int, *, tied: bool
) -> PretrainedConfig:
    """Return the sizes in the published config.json of a Qwen3 model."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


LARGE_MODELS: dict[str, PretrainedConfig] = {
    "Qwen3-0.6B": make_qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": make_qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": make_qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": make_qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen3-14B": make_qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen3-32B": make_qwen3(5120, 25600, 64, 64, tied=False),
    "Llama-3.3-70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
}

INTRODUCTION = """# Memory of a run

`ludus train --dry-run` prints a line for a learner rank, a rollout worker and the node of rank 0: \
the memory that each needs at most, what there is, and the parts. If a need may exceed the memory, \
the line names settings with which the need is lower. The start makes the same estimate, and \
refuses a run (exit code 2) that certainly runs out of memory. Only needs that no run avoids are \
compared for that: weights, gradients, optimizer state and their reduction, a whole copy of the \
weights in each publication, and what vLLM requires to start. Activations depend on the lengths of \
episodes, so they never refuse a run.

`learner.max_tokens_per_micro_batch` is chosen if the file does not set it: 16384, halved until \
the estimate needs at most 90 % of the memory, but not below the longest episode. If the memory is \
unknown, it is 16384.

The size of the model comes from its `config.json`; no weights are read. The memory of GPUs comes \
from `nvidia-smi`, and main memory from `/proc/meminfo` and the limit of the pod. In a cluster \
both \
are unknown, so set `placement.gpu_memory_gib` and `placement.node_memory_gib` there. A GPU in \
these settings counts as a whole, even if an actor reserves a part.

This page is generated: `.venv/bin/python dev/memory_docs.py`.

## Learner rank

n is the number of parameters, t of trained parameters (of adapters, with LoRA), R of ranks, c the \
bytes of a number in the computation (2 in bfloat16, 4 in float32), V the size of the vocabulary, \
H \
the width. The root is the parameters outside the layers: embeddings, head and last norm. Code: \
`trainer/ludus/trainer/setup/memory/learner.py`.

| part | bytes | source |
|---|---|---|
| weights | 4 n / R; with LoRA c n / R + 4 t / R | FSDP2 shards, in float32; frozen weights have \
the type \
of the computation |
| gradients | 4 t / R; 4 t with `learner.memory.reduce_gradients = "last"` | shards after each \
reduction; otherwise a whole sum until the last micro-batch |
| optimizer | 8 t / R | two moments of AdamW in float32 |
| reference model | 4 n / R (0 on the GPU with `learner.offload_reference`) + c root | with \
`kl_coef` > 0 and without LoRA; the root stays gathered after a forward pass |
| critic | as the policy | a critic with its own model has weights, gradients and moments too |
| activations | tokens x layers x (2 (4 + 2c) H + 2c (Q + K) + 4c I), and (4 + c)(Q + K) with \
norms \
of queries and keys | tensors that the layers of transformers keep: two norms, attention, \
feed-forward; Q, K, I are the sizes of queries, keys and hidden units. With a tree mask, keys and \
values are repeated to Q |
| with `activation_checkpointing` | tokens x layers x c H, and one layer | inputs of layers, and \
the \
layer that is computed again |
| tree mask | tokens x L x (1 + c layers) if L <= 512; otherwise tokens x 512 x (1 + c) | the \
mask, and its float copy in each attention; longer rows compute blocks of 512 queries, whose masks \
are not kept; L = s \
+ \
sqrt(s^2 + s a / b) is the cheapest row length for a common prefix of s tokens, with the costs a \
of \
a token and b of a pair; s is the longest episode |
| logits | 3 x 4 x chunk x V; chunk x V <= 2^27 | `learner/chunked_logprobs.py`; up to 2^20 logits \
are computed at once, in five copies |
| gradient of the head | c V H; (c + 4) V H with several chunks | the sum over chunks is float32 |
| gathered weights | c root, and the largest of c V H + a layer's c or reduction, or the root's \
reduction | FSDP2, if R > 1 or in bfloat16 |
| reduction of p parameters | max((c + 4) p, 4 p + 4 p / R); 4 p more with gloo and R > 1 | \
gradients, their float32 copy, the sum, and the shard; a GPU also holds the next layer (c p) and \
the \
previous reduction (4 p) |
| CUDA | 1 GiB | context and libraries; an assumption, not measured |

Activations, logits and gathered weights do not peak at the same time. The estimate takes the \
largest of three moments: the head (activations, logits, gradient of the head), a layer \
(activations, reduction of the layer), and the end of the backward pass (reduction of the root).

A micro-batch has at most `max_tokens_per_micro_batch` tokens, or one longer episode, and not more \
than a rank's share of a minibatch: `groups_per_step` x `group_size` x the longest episode, \
divided \
by ranks and minibatches, and one episode more. The parts of a step are an upper bound, because \
episodes are usually shorter than `max_tokens`, and common prefixes are computed once.

## Rollout worker

| part | bytes | source |
|---|---|---|
| weights | c n / tensor_parallel_size; twice as much for vLLM on a CPU | the packed copy of its \
kernels |
| KV cache, vLLM | `kv_cache_gib`; on a GPU without it, `gpu_memory_utilization` of the GPU with \
weights and computation | refused if the longest sequence does not fit, as vLLM does |
| KV cache, transformers | the smaller of 2 `kv_cache_mib` and sequences x `max_tokens` x 2 c \
layers \
K | twice, while sequences join |
| prefix cache | the smaller of `prefix_cache_mib` and the same product | |
| logits | 3 x 4 x sequences x V | logits, probabilities, and a temporary tensor |
| main memory: fetched weights | the published version | a store other than Ray's, whose memory is \
shared |
| main memory: last version | the published version | `weights.full_every` > 1 |
| main memory: base model | c n | LoRA: the weights to which adapters are added |

## Node

| part | bytes | source |
|---|---|---|
| learner ranks | the step of each rank on the node that computes on the CPU | above |
| publication | 4 n on rank 0, and 2 n for the cast to bfloat16 (of adapters, with LoRA); ranks on \
the CPU keep weights and moments meanwhile | `gather_weights` and `cast_floats` |
| stored weights | (`keep_versions` + 1) x the published version | Ray's object store, in shared \
memory |
| rollout workers | engine on the CPU, and main memory of each worker | above |
| programs | PROGRAM_MB MB for the driver, each rank and each worker | `RssAnon` of \
a process after \
`import ray, ludus.trainer.learner.learner`: 320 MB |

The larger of the step and the publication counts. In a cluster, the node of rank 0 is assumed to \
have at most eight ranks, and no worker.
""".replace("PROGRAM_MB", f"{plan.PROGRAM_BYTES / 1e6:.0f}")


def make_page() -> str:
    """Return the text of the page."""
    return "".join(
        [
            INTRODUCTION,
            _make_measurements(),
            _make_example_tables(),
            _make_chart_table(),
            _make_size_table(),
        ]
    )


def measure_config(config: PretrainedConfig) -> ModelShape:
    """Return the sizes of a model, from a skeleton with one layer."""
    num_layers = config.num_hidden_layers
    single_config = type(config).from_dict(
        {**config.to_dict(), "num_hidden_layers": 1, "layer_types": None}
    )
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(single_config)
    shape = measure_skeleton(skeleton, None)
    num_parameters = shape.num_root_parameters + num_layers * shape.num_layer_parameters
    return replace(shape, num_layers=num_layers, num_parameters=num_parameters)


def _make_memory(run: LanguageModelRun, shape: ModelShape, machine: Machine) -> plan.RunMemory:
    rank = RankMemory(run, shape)
    return plan.RunMemory(run, machine, rank, WorkerMemory(run, shape, rank.published_bytes))


def _make_measurements() -> str:
    """Return the comparison of the formula with bench/learner_memory.py."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    bench_shapes = [measure_config(_make_bench_config(num_layers)) for num_layers in range(1, 80)]
    shape_by_size = {shape.num_parameters: shape for shape in bench_shapes}
    rows = [("parameters", "R", "construction", "step", "publish", "save", "export", "load")]
    for result in results["runs"]:
        if not result["frees_at_once"]:
            continue
        shape = shape_by_size[result["num_parameters"]]
        memory = RankMemory(_make_bench_run(result["num_ranks"]), shape)
        estimates = {
            "construction": memory.construction_bytes(),
            "step": memory.step_bytes(6),
            "publish": memory.publish_bytes(),
            "save": memory.save_bytes(),
            "export": memory.export_bytes(),
            "load": memory.load_bytes(),
        }
        cells = [
            f"{estimates[phase] / 1e6:,.0f} / {result['max_peak_bytes'][phase] / 1e6:,.0f}"
            for phase in rows[0][2:]
        ]
        size = f"{result['num_parameters'] / 1e6:.0f} M"
        rows.append((size, str(result["num_ranks"]), *cells))
    return (
        "\n## Formula and measurement\n\nPeak private memory of a rank on the CPU in MB above its "
        "start, by the formula / as measured by\n"
        f"`{results['command']}` (`bench/results/learner_memory.json`), with which\n"
        f"`tests/memory/test_learner_memory.py` compares the formula (at most 10 % apart). "
        f"{OBJECT_BYTES / 1e6:.0f} MB, and {LAYER_OBJECT_BYTES / 1e6:.1f} MB per layer, are "
        "for Python objects and partly used pages; both are fitted to these rows. The C library "
        "returned freed memory at once; without that, it keeps freed blocks below 32 MB, which "
        "the estimate leaves out. `tests/memory/test_activations.py` compares the formula for "
        "activations with the tensors of a forward pass. Nothing was measured on a GPU.\n\n"
        + make_table(*rows)
    )


def _make_bench_config(num_layers: int) -> PretrainedConfig:
    """Return the configuration of a model of bench/learner_memory.py."""
    return Qwen2Config(
        vocab_size=4096,
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=num_layers,
        num_attention_heads=10,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


def _make_bench_run(num_ranks: int) -> LanguageModelRun:
    """Return the run of bench/learner_memory.py."""
    learner = {
        "num_ranks": num_ranks,
        "dtype": "bfloat16",
        "max_tokens_per_micro_batch": 6,
        "packing": "pad",
        "activation_checkpointing": True,
        "memory": {"reduce_gradients": "each"},
    }
    rollout = {"max_tokens": 6, "max_completion_tokens": 3, "group_size": 2}
    return LanguageModelRun.model_validate({"learner": learner, "rollout": rollout})


def _list_examples() -> Iterator[tuple[str, LanguageModelRun]]:
    """Yield the path and the configuration of each example with a real model."""
    for path in sorted(ROOT.glob("examples/*/*.toml")):
        text = path.read_text(encoding="utf-8")
        if 'kind = "pretrained"' not in text or re.search(r'^kind = "sft"', text, re.MULTILINE):
            continue
        run = load_run_config(path, [])
        if isinstance(run, LanguageModelRun) and isinstance(run.model, PretrainedModel):
            yield str(path.relative_to(ROOT)), run


def _find_shape(path: str) -> ModelShape:
    """Return the sizes of the model of an example."""
    name = path.rpartition("/")[2]
    return measure_config(LARGE_MODELS.get(name, SMOLLM2))


def _make_example_tables() -> str:
    rows = [("example", "micro-batch", "learner rank", "rollout worker", "node")]
    for path, run in _list_examples():
        assert isinstance(run.model, PretrainedModel)
        machine = LOCAL_GPU_MACHINE if run.learner.num_gpus_per_rank else LOCAL_CPU_MACHINE
        memory = _make_memory(run, _find_shape(run.model.path), machine)
        memory_plan = memory.make_plan()
        cells = [f"{format_memory(use.num_bytes)} {use.memory_kind}" for use in memory_plan.uses]
        name = path.removeprefix("examples/")
        rows.append((f"[{name}](../{path})", f"{memory_plan.max_tokens_per_micro_batch:,}", *cells))
    return (
        "\n## Examples with real models\n\nMemory at most, on a machine with GPUs of "
        f"{GPU_GIB} GiB and 256 GiB, or for examples without a GPU, 32 GiB. The micro-batch is in "
        "tokens.\n\n" + make_table(*rows)
    )


def _make_chart_table() -> str:
    values = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
    learner = values["runs"]["learner"]
    weights = {**values["storage"]["weights"], "bucket": values["storage"]["s3"]["bucket"]}
    num_ranks = learner["ranksPerPod"]
    node_gib = int(learner["resources"]["limits"]["memory"].removesuffix("Gi"))
    machine = Machine(GPU_GIB * GIB, node_gib * GIB, is_whole_run=False, has_several_gpus=True)
    rows = [
        ("model", "micro-batch", "learner rank", "rollout worker", "pod of the learner", "start")
    ]
    for name, config in LARGE_MODELS.items():
        run = _make_gpu_run(num_ranks, weights=weights)
        memory = _make_memory(run, measure_config(config), machine)
        result = memory.make_plan()
        rows.append(
            (
                name,
                f"{result.max_tokens_per_micro_batch:,}",
                *(format_memory(use.num_bytes) for use in result.uses),
                _describe_start(memory, result),
            )
        )
    return (
        "\n## values-gpu.yaml\n\nA pod of the learner in "
        f"[values-gpu.yaml](../charts/ludus/values-gpu.yaml) has {num_ranks} ranks and {node_gib} "
        f"GiB, with GPUs of {GPU_GIB} GiB. Memory at most, in bfloat16 with activation "
        f"checkpointing, episodes of {MAX_TOKENS:,} tokens, the store of the "
        "chart, and vLLM's default share of a GPU.\n\n" + make_table(*rows)
    )


def _describe_start(memory: plan.RunMemory, result: MemoryPlan) -> str:
    """Return whether a run fits, may not fit, or is refused."""
    if find_problem(memory) is not None:
        return "refused"
    return "fits" if all(use.fits for use in result.uses) else "may not fit"


def _make_gpu_run(
    num_ranks: int, max_tokens: int | None = None, **sections: object
) -> LanguageModelRun:
    return LanguageModelRun.model_validate(
        {
            "model": {"kind": "pretrained", "path": "model"},
            "generator": {"kind": "vllm"},
            "learner": {
                "num_ranks": num_ranks,
                "num_gpus_per_rank": 1,
                "dtype": "bfloat16",
                "activation_checkpointing": True,
                "max_tokens_per_micro_batch": max_tokens,
            },
            "rollout": {"num_gpus_per_worker": 1, "max_tokens": MAX_TOKENS},
            **sections,
        }
    )


def _make_size_table() -> str:
    rows = [("model", "parameters", *(f"{num_ranks}" for num_ranks in NUM_RANKS_IN_TABLE))]
    for name, config in LARGE_MODELS.items():
        shape = measure_config(config)
        cells = []
        for num_ranks in NUM_RANKS_IN_TABLE:
            run = _make_gpu_run(num_ranks, MAX_TOKENS)
            parts = RankMemory(run, shape).list_step_parts(MAX_TOKENS)
            num_bytes = sum(part.num_bytes for part in parts) + plan.CUDA_BYTES
            cells.append(f"{num_bytes / GIB:,.0f}")
        rows.append((name, f"{shape.num_parameters / 1e9:.1f} B", *cells))
    return (
        "\n## Size and ranks\n\nGPU memory of a learner rank in GiB, by the number of ranks, in "
        "bfloat16 with activation checkpointing and micro-batches of one episode of "
        f"{MAX_TOKENS:,} tokens. These are computed, not measured.\n\n" + make_table(*rows)
    )


if __name__ == "__main__":
    write_or_check_page("memory.md", make_page())
