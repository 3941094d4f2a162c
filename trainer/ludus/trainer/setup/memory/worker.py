"""The memory of a rollout worker, in bytes: its engine, and the weights that it fetches.

    weights     c n, divided by the GPUs of the worker; on a CPU, vLLM also packs a copy
    KV cache    c 2 layers keys per token: a fixed size for vLLM, and for transformers at most what
                all running sequences need, twice while sequences join
    logits      float32, of one token of each sequence
    staging     main memory: a fetched version, unless Ray's shared memory holds it, and a copy of
                the last version for differences
    base model  main memory: the weights to which adapters are added

c = bytes of a number in the computation, n = parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ludus.proto.config import LanguageModelRun, RayWeightStore, TransformersGenerator
from ludus.proto.memory_plan import MemoryPart
from ludus.trainer.setup.memory.learner import SUM_BYTES
from ludus.trainer.setup.memory.machine import GIB, MIB
from ludus.trainer.setup.memory.shape import ModelShape

_DEFAULT_CPU_CACHE_GIB = 1
_NUM_LOGIT_COPIES = 3
"""Logits, probabilities, and a temporary tensor."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory of one rollout worker, in bytes; with several GPUs, of each GPU."""

    run: LanguageModelRun
    shape: ModelShape
    published_bytes: int
    """Size of a published version."""

    @property
    def is_on_gpu(self) -> bool:
        """True if the engine computes on a GPU."""
        return self.run.rollout.num_gpus_per_worker > 0

    @property
    def weight_bytes(self) -> int:
        """Weights of the engine on each of its GPUs, or in main memory."""
        return self._itemsize * self.shape.num_parameters // self._num_gpus

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum number of tokens of a sequence in the engine."""
        generator = self.run.generator
        limit = None if isinstance(generator, TransformersGenerator) else generator.max_model_tokens
        return limit or self.run.rollout.max_tokens

    @property
    def sequence_cache_bytes(self) -> int:
        """KV cache of the longest sequence on each GPU, if all layers cache all tokens."""
        return self.max_sequence_tokens * self._token_cache_bytes

    @property
    def min_cache_bytes(self) -> int:
        """KV cache without which vLLM does not start; 0 if it depends on the kinds of layers."""
        return self.sequence_cache_bytes if self.shape.has_full_cache else 0

    @property
    def reserves_memory(self) -> bool:
        """True if the engine needs a certain memory, not a share of the GPU."""
        return isinstance(self.run.generator, TransformersGenerator) or (
            self.fixed_cache_bytes is not None
        )

    @property
    def fixed_cache_bytes(self) -> int | None:
        """KV cache that vLLM reserves; None if it takes what its share of the GPU leaves."""
        generator = self.run.generator
        if isinstance(generator, TransformersGenerator):
            return None
        if generator.kv_cache_gib is None and self.is_on_gpu:
            return None
        return (generator.kv_cache_gib or _DEFAULT_CPU_CACHE_GIB) * GIB

    def list_engine_parts(self, gpu_bytes: int | None) -> list[MemoryPart]:
        """Return the parts of the engine's memory, on each GPU or in main memory.

        Args:
            gpu_bytes: memory of a GPU; None if it is unknown.
        """
        parts = {"weights": self.weight_bytes}
        generator = self.run.generator
        if isinstance(generator, TransformersGenerator):
            num_tokens = self._num_sequences * self.run.rollout.max_tokens
            cache_bytes = num_tokens * self._token_cache_bytes
            parts["KV cache"] = min(cache_bytes, 2 * generator.kv_cache_mib * MIB)
            parts["prefix cache"] = min(cache_bytes, generator.prefix_cache_mib * MIB)
        elif not self.is_on_gpu:
            parts["packed weights"] = self.weight_bytes
            parts["KV cache"] = self.fixed_cache_bytes or 0
        elif self.fixed_cache_bytes is not None:
            parts["KV cache"] = self.fixed_cache_bytes
        elif gpu_bytes is not None:
            reserved_bytes = int(generator.gpu_memory_utilization * gpu_bytes)
            parts["KV cache and computation"] = max(
                self.sequence_cache_bytes, reserved_bytes - self.weight_bytes
            )
            return _make_parts(parts)
        else:
            parts["KV cache of a sequence"] = self.sequence_cache_bytes
        parts["logits"] = (
            _NUM_LOGIT_COPIES * SUM_BYTES * self._num_sequences * self.shape.vocab_size
        )
        return _make_parts(parts)

    def list_staging_parts(self) -> list[MemoryPart]:
        """Return the parts of main memory that hold weights outside the engine."""
        parts: dict[str, int] = {}
        if not isinstance(self.run.weights, RayWeightStore):
            parts["fetched weights"] = self.published_bytes
        if self.run.weights.full_every > 1:
            parts["last version"] = self.published_bytes
        if self.shape.num_adapter_parameters:
            parts["base model"] = self._itemsize * self.shape.num_parameters
        return _make_parts(parts)

    @property
    def _itemsize(self) -> int:
        dtype: torch.dtype = getattr(torch, self.run.learner.dtype)
        return dtype.itemsize

    @property
    def _num_gpus(self) -> int:
        generator = self.run.generator
        if isinstance(generator, TransformersGenerator):
            return 1
        return generator.tensor_parallel_size

    @property
    def _token_cache_bytes(self) -> int:
        return self._itemsize * self.shape.num_cached_per_token // self._num_gpus

    @property
    def _num_sequences(self) -> int:
        """Maximum number of sequences decoded at once."""
        rollout, generator = self.run.rollout, self.run.generator
        if isinstance(generator, TransformersGenerator):
            limit = generator.max_batch_size
        else:
            limit = generator.max_num_seqs
        return min(limit, rollout.num_groups_in_flight * rollout.group_size)


def _make_parts(sizes: dict[str, int]) -> list[MemoryPart]:
    return [MemoryPart(name=name, num_bytes=size) for name, size in sizes.items() if size]
