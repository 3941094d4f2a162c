"""Two ranks that load, train and export models of several kinds, and their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from ludus.proto.config import GrpoConfig, LoraConfig
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.learner import Learner
from ludus.trainer.learner.model import gather_full_tensor
from ludus.trainer.learner.process_group import leave_process_group
from ludus.trainer.models.tiny import make_tokenizer
from tests.learner.tiny_policy import TEXTS, make_batch, make_learner

NUM_RANKS = 2
MAX_FILE_BYTES = 30_000
"""Maximum size of an exported file, so that each model has several files."""
LORA_CONFIG = LoraConfig(rank=2, targets=("q_proj", "down_proj"))
NUM_LARGE_BYTES = 4 * 41_000_000
"""Approximate size of the large model in float32."""
COEFFICIENTS = Coefficients(learning_rate=1e-3, entropy=0.0, kl=0.0)

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_EXPERT_SIZES = {**_SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "tied_embeddings": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "fused_experts": lambda: Qwen3MoeConfig(**_EXPERT_SIZES, num_experts=3, head_dim=8),
    "persistent_buffers": lambda: DeepseekV3Config(
        **_EXPERT_SIZES,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    "rank_without_expert": lambda: MixtralConfig(
        **_SIZES, num_local_experts=1, num_experts_per_tok=1
    ),
}
"""Configurations of the models by kind."""


@dataclass(frozen=True)
class RankResult:
    """Results of one model on rank 0."""

    different_names: list[str]
    """Weights and buffers that differ from those that transformers loads."""
    loss: float
    grad_norm: float | None
    num_files: list[int]
    """Number of files of weights by the rank that wrote them."""


def make_model_folder(folder: Path, kind: str) -> None:
    """Create a model with random bfloat16 weights and buffers, and its tokenizer."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.normal_()
    save_model(model, folder)


def make_large_model_folder(folder: Path) -> None:
    """Create a model of NUM_LARGE_BYTES, most of it in its layers."""
    torch.manual_seed(0)
    sizes = {**_SIZES, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 8}
    save_model(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)), folder)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Save a model in bfloat16, with a tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer(TEXTS * 10, 290).save_pretrained(folder)


def run_rank(rank: int, folder: str) -> None:
    """Save the results of all models from rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS
    )
    results = {kind: train_and_export(Path(folder), kind) for kind in CONFIGS}
    adapters = train_adapters(Path(folder))
    peak_bytes = measure_construction(Path(folder) / "large")
    if rank == 0:
        torch.save((results, adapters), f"{folder}/results.pt")
    torch.save(peak_bytes, f"{folder}/peak-{rank}.pt")
    leave_process_group()


def train_and_export(folder: Path, kind: str) -> RankResult:
    """Load a model, export it, and train one step; a collective."""
    model_path = str(folder / kind)
    learner = make_learner(model_path, packing="pad", activation_checkpointing=True)
    language_model = learner.model.policy.language_model
    # The names have the prefixes of activation checkpointing.
    buffers = {
        name.replace("_checkpoint_wrapped_module.", ""): buffer
        for name, buffer in language_model.named_buffers()
    }
    weights = buffers | {
        name: gather_full_tensor(tensor) for name, tensor in language_model.state_dict().items()
    }
    plain_model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    plain_weights = dict(plain_model.named_buffers()) | plain_model.state_dict()
    assert weights.keys() == plain_weights.keys()
    different_names = [
        name for name in weights if not torch.equal(weights[name], plain_weights[name])
    ]
    saved_files = learner.export_model(folder / f"{kind}-export", max_file_bytes=MAX_FILE_BYTES)
    num_files = [0] * dist.get_world_size()
    dist.all_gather_object(
        num_files, sum(file.path.suffix == ".safetensors" for file in saved_files)
    )
    metrics = learner.train_step(make_batch(), COEFFICIENTS)
    return RankResult(different_names, metrics.loss, metrics.grad_norm, num_files)


def make_adapter_learner(model_path: str) -> Learner:
    """Return a learner that trains adapters over a bfloat16 model."""
    return make_learner(
        model_path, GrpoConfig(geometric_mask=None), LORA_CONFIG, dtype="bfloat16", packing="pad"
    )


def train_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Train and export adapters, and return the initial adapters; a collective."""
    learner = make_adapter_learner(str(folder / "tied_embeddings"))
    adapters = learner.gather_weights()
    for parameter in learner.model.parameters():
        expected_dtype = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == expected_dtype
    learner.train_step(make_batch(), COEFFICIENTS)
    learner.export_model(folder / "adapters-export", max_file_bytes=MAX_FILE_BYTES)
    return adapters


def measure_construction(model_path: Path) -> int:
    """Return the peak of this rank's private memory during construction, in bytes above the start.

    Other learners were built before, so the memory of imports does not count.
    """
    dist.barrier()
    with sample_private_bytes() as samples:
        learner = make_learner(str(model_path), packing="pad")
    assert learner is not None
    return max(samples) - samples[0]


@contextmanager
def sample_private_bytes() -> Iterator[list[int]]:
    """Append this process's private memory in bytes to the yielded list, every 2 ms."""
    samples = [read_private_bytes()]
    is_done = threading.Event()

    def sample() -> None:
        while not is_done.is_set():
            samples.append(read_private_bytes())
            time.sleep(0.002)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_done.set()
        thread.join()
        samples.append(read_private_bytes())


def read_private_bytes() -> int:
    """Return the memory of this process that no file backs, in bytes."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024
