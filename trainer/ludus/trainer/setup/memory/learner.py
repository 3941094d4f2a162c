"""The private memory of a learner rank, in bytes, phase by phase of a run.

    construction   weights
    step           weights, gradients, optimizer state, reference model, and the largest of
                     head      activations, logits, gradient of the head's weight
                     layer     activations, a gathered layer and the reduction of its gradients
                     root      the reduction of the gradients of embeddings and head
    publish        on rank 0: weights, optimizer state, a whole copy, and its cast
    save, export   weights, optimizer state, and for the export a gathered tensor
    load           weights, optimizer state, and gradients that create the state

n = parameters, t = trained parameters, R = ranks, c = bytes of a number in the computation. Weights
that are trained, gradients, and the two moments of AdamW are float32. `bench/learner_memory.py`
measures the phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ludus.proto.config import LanguageModelRun
from ludus.proto.memory_plan import MemoryPart
from ludus.trainer.learner.chunked_logprobs import MAX_CHUNK_LOGITS
from ludus.trainer.learner.language_head import MAX_PLAIN_LOGITS
from ludus.trainer.learner.tree_attention import QUERY_BLOCK_SIZE
from ludus.trainer.setup.memory.shape import ModelShape

SUM_BYTES = 4
"""Bytes of a number in weights, gradients, moments and logits, which are float32."""
_NUM_MOMENTS = 2
_NUM_PLAIN_COPIES, _NUM_CHUNK_COPIES = 5, 3
"""Number of tensors of the size of all logits, or of the logits of a chunk, that exist at once."""
OBJECT_BYTES, LAYER_OBJECT_BYTES = 2_000_000, 600_000
"""Memory of Python objects, and of pages that tensors fill only in part: of a learner, and of each
layer of its model. Both are measured."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one learner rank, in bytes."""

    run: LanguageModelRun
    shape: ModelShape
    critic: ModelShape | None = None
    """Sizes of a critic with its own model."""

    @property
    def is_on_gpu(self) -> bool:
        """True if the rank computes on a GPU."""
        return self.run.learner.num_gpus_per_rank > 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks, which share the weights."""
        return self.run.learner.num_ranks

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens of a sequence."""
        rollout = self.run.rollout
        return max(
            environment.max_tokens or rollout.max_tokens
            for environment in self.run.environments.values()
        )

    @property
    def weight_bytes(self) -> int:
        """4 n / R; with adapters c n / R for the frozen weights, and 4 t / R."""
        shape, frozen_bytes = self.shape, 0
        if shape.num_adapter_parameters:
            frozen_bytes = self._itemsize * shape.num_parameters
        return self._divide(frozen_bytes + SUM_BYTES * self._num_trained)

    @property
    def gradient_bytes(self) -> int:
        """4 t / R. Without a reduction after each micro-batch, 4 t for several micro-batches."""
        num_trained = self._num_trained
        if self._is_sharded and not self.run.learner.memory.reduces_each(num_trained):
            return SUM_BYTES * num_trained
        return self._divide(SUM_BYTES * num_trained)

    @property
    def optimizer_bytes(self) -> int:
        """8 t / R."""
        return self._divide(_NUM_MOMENTS * SUM_BYTES * self._num_trained)

    @property
    def reference_bytes(self) -> int:
        """4 n / R for a reference model, and c of its embeddings and head, which stay gathered."""
        if self.run.algorithm.kl_coef == 0 or self.shape.num_adapter_parameters:
            return 0
        gathered_bytes = self._gather(self.shape.num_root_parameters)
        if self.is_on_gpu and self.run.learner.offload_reference:
            return gathered_bytes
        return gathered_bytes + self._divide(SUM_BYTES * self.shape.num_parameters)

    @property
    def object_bytes(self) -> int:
        """Memory of Python objects and partly used pages, in main memory."""
        return OBJECT_BYTES + LAYER_OBJECT_BYTES * self.shape.num_layers

    @property
    def offloaded_bytes(self) -> int:
        """Main memory of a reference model that is offloaded from a GPU."""
        if self.reference_bytes == 0 or not self.run.learner.offload_reference:
            return 0
        return self._divide(SUM_BYTES * self.shape.num_parameters)

    @property
    def min_state_bytes(self) -> int:
        """Memory between two steps, in which a publication comes."""
        return self.weight_bytes + self.optimizer_bytes + self.reference_bytes

    @property
    def min_step_bytes(self) -> int:
        """Memory that every step needs, however few tokens it has."""
        shape = self.shape
        num_trained_root = 0 if shape.num_adapter_parameters else shape.num_root_parameters
        gradient_bytes = self._divide(SUM_BYTES * (self._num_trained - num_trained_root))
        reduction_bytes = self._gather(shape.num_root_parameters) + self._reduce(num_trained_root)
        return self.min_state_bytes + gradient_bytes + reduction_bytes

    def construction_bytes(self) -> int:
        """Return the memory of the models alone."""
        return self.weight_bytes + self.object_bytes

    def step_bytes(self, max_tokens: int) -> int:
        """Return the peak in a step whose micro-batches have at most this number of tokens."""
        return sum(part.num_bytes for part in self.list_step_parts(max_tokens)) + self.object_bytes

    def publish_bytes(self) -> int:
        """Return the peak in main memory of rank 0 if it computes on the CPU."""
        return self.save_bytes() + self.staging_bytes

    def save_bytes(self) -> int:
        """Return the peak while a checkpoint is saved."""
        return self.weight_bytes + self.optimizer_bytes + self.object_bytes

    def export_bytes(self) -> int:
        """Return the peak while a model is exported: a tensor is gathered and cast."""
        gathered_bytes = 0
        if self.num_ranks > 1:
            gathered_bytes = (SUM_BYTES + self._itemsize) * self.shape.num_largest_parameters
        return self.save_bytes() + gathered_bytes

    def load_bytes(self) -> int:
        """Return the peak while a checkpoint is loaded."""
        return self.save_bytes() + self._divide(SUM_BYTES * self._num_trained)

    @property
    def staging_bytes(self) -> int:
        """Main memory of rank 0 in a publication: 4 n for a whole copy, and its cast if needed."""
        num_published = self.shape.num_adapter_parameters or self.shape.num_parameters
        return SUM_BYTES * num_published + (
            self.published_bytes if self.published_bytes < SUM_BYTES * num_published else 0
        )

    @property
    def published_bytes(self) -> int:
        """Size of a published version."""
        num_published = self.shape.num_adapter_parameters or self.shape.num_parameters
        dtype = self.run.weights.choose_dtype(self.run.learner.dtype)
        return num_published * int(getattr(torch, dtype).itemsize)

    def limit_tokens(self, max_tokens: int) -> int:
        """Return the maximum number of tokens of a micro-batch.

        A micro-batch has at most `max_tokens`, or the longest sequence. It has no more tokens than
        a rank's share of a minibatch, in which one more sequence may be whole.
        """
        run, longest = self.run, self.longest_sequence
        num_sequences = run.training.groups_per_step * run.rollout.group_size
        if not getattr(run.model, "keep_thinking", True) or any(
            environment.agent is not None for environment in run.environments.values()
        ):
            num_sequences *= run.rollout.max_turns
        num_parts = run.learner.num_ranks * run.learner.num_minibatches
        share = min(num_sequences, math.ceil(num_sequences / num_parts) + 1) * longest
        return min(max(max_tokens, longest), share)

    def list_step_parts(self, max_tokens: int) -> list[MemoryPart]:
        """Return the parts of the peak in a step, without Python objects.

        Args:
            max_tokens: see learner.max_tokens_per_micro_batch.
        """
        num_tokens = self.limit_tokens(max_tokens)
        activation_bytes = self._count_activations(num_tokens)
        transients = [
            (0, 0, self._count_root_bytes()),
            (activation_bytes, 0, self._count_layer_bytes()),
            (activation_bytes, *self._count_head_bytes(num_tokens)),
        ]
        activation_bytes, logit_bytes, gathered_bytes = max(transients, key=sum)
        parts = {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "reference model": self.reference_bytes,
            f"activations of {num_tokens:,} tokens": activation_bytes,
            "logits": logit_bytes,
            "gathered weights": gathered_bytes,
        }
        return [MemoryPart(name=name, num_bytes=size) for name, size in parts.items() if size]

    @property
    def _itemsize(self) -> int:
        dtype: torch.dtype = getattr(torch, self.run.learner.dtype)
        return dtype.itemsize

    @property
    def _is_sharded(self) -> bool:
        """True if FSDP2 wraps the model; see `learner.model.is_sharded`."""
        return self.num_ranks > 1 or self.run.learner.dtype != "float32"

    @property
    def _num_trained(self) -> int:
        return self.shape.num_trained + (0 if self.critic is None else self.critic.num_trained)

    def _divide(self, num_bytes: int) -> int:
        return math.ceil(num_bytes / self.num_ranks)

    def _gather(self, num_parameters: int) -> int:
        """Return the size of gathered parameters, cast for the computation."""
        return self._itemsize * num_parameters if self._is_sharded else 0

    def _reduce(self, num_parameters: int) -> int:
        """Return the memory in which FSDP2 adds up the gradients of a group of parameters.

        First the gradients and their float32 copy, then the copy, its sum, and the shard. Gloo adds
        up in another copy.
        """
        if not self._is_sharded:
            return 0
        sum_bytes = SUM_BYTES * num_parameters
        gloo_bytes = 0 if self.is_on_gpu or self.num_ranks == 1 else sum_bytes
        return max(
            self._itemsize * num_parameters + sum_bytes,
            sum_bytes + gloo_bytes + self._divide(sum_bytes),
        )

    def _count_root_bytes(self) -> int:
        """Return the memory for embeddings and head at the end of a backward pass."""
        shape = self.shape
        if shape.num_adapter_parameters:
            return self._gather(shape.num_root_parameters)
        if not self._is_sharded:
            return SUM_BYTES * shape.vocab_size * shape.width
        return self._gather(shape.num_root_parameters) + self._reduce(shape.num_root_parameters)

    def _count_layer_bytes(self) -> int:
        """Return the memory for gathered weights in the backward pass of a layer.

        A GPU gathers the next layer and adds up the previous layer's gradients at the same time.
        """
        shape, has_adapters = self.shape, self.shape.num_adapter_parameters > 0
        num_trained = shape.num_layer_parameters
        if has_adapters:
            num_trained = shape.num_adapter_parameters // shape.num_layers
        layer_bytes = self._gather(shape.num_layer_parameters)
        num_bytes = max(layer_bytes, self._reduce(num_trained))
        if self.is_on_gpu and self._is_sharded:
            num_bytes += layer_bytes + SUM_BYTES * num_trained
        if not has_adapters:
            num_bytes += self._gather(shape.vocab_size * shape.width)  # gradient of the head
        return self._gather(shape.num_root_parameters) + num_bytes

    def _count_head_bytes(self, num_tokens: int) -> tuple[int, int]:
        """Return the memory for logits, and for the head's weights with their gradient."""
        shape = self.shape
        num_logits, num_copies = num_tokens * shape.vocab_size, _NUM_PLAIN_COPIES
        chunk_size = max(1, MAX_CHUNK_LOGITS // shape.vocab_size) * shape.vocab_size
        has_several_chunks = num_logits > chunk_size
        if num_logits > MAX_PLAIN_LOGITS:
            num_logits, num_copies = min(num_logits, chunk_size), _NUM_CHUNK_COPIES
        gradient_itemsize = self._itemsize
        if has_several_chunks and gradient_itemsize < SUM_BYTES:
            gradient_itemsize += SUM_BYTES  # a float32 sum over the chunks
        if shape.num_adapter_parameters:
            gradient_itemsize = 0
        gradient_bytes = gradient_itemsize * shape.vocab_size * shape.width
        logit_bytes = num_copies * SUM_BYTES * num_logits
        return logit_bytes, self._gather(shape.num_root_parameters) + gradient_bytes

    def _count_activations(self, num_tokens: int) -> int:
        """Return the size of the tensors that a backward pass needs.

        For each token and layer: the input, the float32 copy and the output of two norms; queries,
        keys, values and output of the attention; four tensors of hidden units. With activation
        checkpointing, only the inputs of layers are kept, and one layer is computed again.
        """
        shape, itemsize = self.shape, self._itemsize
        packs_trees = self.run.learner.packing == "tree"
        norm_bytes = (SUM_BYTES + 2 * itemsize) * shape.width
        # Keys and values are repeated for all heads of the queries if there is a mask.
        key_size = shape.query_size if packs_trees else shape.key_size
        token_bytes = 2 * norm_bytes
        token_bytes += itemsize * 2 * (shape.query_size + key_size)
        token_bytes += itemsize * 4 * shape.intermediate_size
        if shape.has_query_norm:
            token_bytes += (SUM_BYTES + itemsize) * (shape.query_size + shape.key_size)
        layer_bytes, mask_bytes = num_tokens * token_bytes, 0
        if packs_trees:
            row_length = self._estimate_row_length(num_tokens)
            num_pairs = num_tokens * min(row_length, QUERY_BLOCK_SIZE)
            mask_bytes = num_pairs
            if row_length <= QUERY_BLOCK_SIZE:
                layer_bytes += itemsize * num_pairs
            else:  # the backward pass computes the mask of one block at a time again
                mask_bytes += itemsize * num_pairs
        num_layers = shape.num_layers
        if self.run.learner.activation_checkpointing:
            mask_bytes += num_layers * num_tokens * itemsize * shape.width
            num_layers = 1
        num_bytes = num_layers * layer_bytes + mask_bytes + num_tokens * norm_bytes
        return num_bytes + (0 if self.critic is None else self._count_critic_share(num_bytes))

    def _count_critic_share(self, num_bytes: int) -> int:
        """Return the size of the activations of a critic, in proportion to those of the policy."""
        assert self.critic is not None
        return math.ceil(num_bytes * self.critic.num_parameters / self.shape.num_parameters)

    def _estimate_row_length(self, num_tokens: int) -> int:
        """Return the length of the cheapest rows of trees whose sequences share a long prefix.

        N tokens after a common prefix of s tokens need N / (L - s) rows of L tokens, each with the
        cost L (a + b L), where a is the cost of a token and b that of a pair. The total is lowest
        at L = s + sqrt(s^2 + s a / b). The longest possible prefix is a whole sequence.
        """
        shape, prefix = self.shape, self.longest_sequence
        cost_ratio = shape.num_layer_parameters / (2 * shape.query_size)
        return min(num_tokens, round(prefix + math.sqrt(prefix**2 + prefix * cost_ratio)))
