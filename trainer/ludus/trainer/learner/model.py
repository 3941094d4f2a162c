"""The policy as a torch module that maps rows of tokens to log-probs of the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ludus.proto.config import LearnerConfig
from ludus.trainer.learner.language_head import EntropyMode, LanguageHead
from ludus.trainer.learner.micro_batches import PackedRows
from ludus.trainer.learner.packing import RowCosts
from ludus.trainer.learner.tree_attention import make_tree_mask, use_tree_attention

VALUE_HEAD = "value_head"

_Module = TypeVar("_Module", bound=nn.Module)


class PolicyOutput(NamedTuple):
    """Outputs of a policy for packed rows, in a tuple so that FSDP finds the tensors.

    Shapes: E = distinct sampled tokens, N = samples.
    """

    logprobs: Tensor
    """float32 [E] of the sampled tokens."""
    entropies: Tensor | None
    """float32 [E] of the distribution that each token was sampled from."""
    values: Tensor | None
    """float32 [E] of the state before each sampled token; None without a value head."""
    last_values: Tensor | None
    """float32 [N] of the state after each sample's last token."""


class LogitsLoss(NamedTuple):
    """Rows of tokens, and a loss of the policy's logits for them.

    Shapes: B = rows, S = tokens of a row, V = vocabulary.
    """

    token_ids: Tensor
    """int64 [B, S]"""
    attention_mask: Tensor
    """int64 [B, S], 0 for tokens that are masked out."""
    position_ids: Tensor
    """int64 [B, S]"""
    loss_function: Callable[[Tensor], Tensor]
    """Function from float32 logits [B, S, V] to a scalar with a gradient."""


class PolicyModel(nn.Module):
    """A causal language model, optionally with a value head, that outputs log-probs."""

    def __init__(self, language_model: PreTrainedModel, *, has_value_head: bool = False) -> None:
        super().__init__()
        self.language_model = language_model
        use_tree_attention(language_model)
        self._head = LanguageHead(language_model)
        self.value_head: nn.Linear | None = None
        if has_value_head:
            self.value_head = nn.Linear(language_model.config.hidden_size, 1)
            # An untrained critic predicts 0, so that it does not move the policy at first.
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(
        self, rows: PackedRows, temperature: float, entropy_mode: EntropyMode = "none"
    ) -> PolicyOutput:
        """Return log-probs, and values if there is a value head, of the sampled tokens."""
        model_inputs = {
            "input_ids": rows.token_ids,
            "attention_mask": (
                None if rows.ends is None else make_tree_mask(self.language_model, rows.ends)
            ),
            "position_ids": None if rows.ends is None else rows.depths,
        }
        (logprobs, entropies), hidden_states = self._head.compute_output(
            rows, model_inputs, temperature, entropy_mode
        )
        values = last_values = None
        if self.value_head is not None:
            positions = torch.cat([rows.positions, rows.last_positions])
            head_output = self.value_head(hidden_states.index_select(0, positions))
            head_output = head_output.float().squeeze(-1)
            values = head_output[: len(rows.positions)].index_select(0, rows.position_of_target)
            last_values = head_output[len(rows.positions) :]
        return PolicyOutput(logprobs, entropies, values, last_values)

    def compute_logits(
        self, token_ids: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> Tensor:
        """Return float32 logits [B, S, V] of whole rows of tokens [B, S]."""
        logits: Tensor = self.language_model(
            input_ids=token_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).logits
        return logits.float()


def estimate_row_costs(language_model: PreTrainedModel) -> RowCosts:
    """Return costs in multiplications of a forward pass, nearly proportional to time on a CPU."""
    weights = language_model.named_parameters()
    sizes = [weight.numel() for name, weight in weights if weight.dim() == 2 and ".layers." in name]
    config, num_heads = language_model.config, language_model.config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    per_pair = 2 * head_size * num_heads * config.num_hidden_layers
    return RowCosts(per_token=sum(sizes), per_pair=per_pair)


def is_sharded(
    config: LearnerConfig, mesh: DeviceMesh, *, offloads_parameters: bool = False
) -> bool:
    """Return whether `prepare_model` shards models. FSDP2 also casts and offloads parameters."""
    return mesh.size() > 1 or config.dtype != "float32" or offloads_parameters


def prepare_model(
    model: _Module, config: LearnerConfig, mesh: DeviceMesh, *, offloads_parameters: bool = False
) -> _Module:
    """Compile, checkpoint and shard (FSDP2) a model as configured, and return it.

    A single rank in float32 is not wrapped, because it has nothing to shard or cast: for a tiny
    model the hooks would add a fifth to a step's time. With `offloads_parameters`, the parameters
    stay in main memory until they are used.
    """
    layers = [
        (modules, index)
        for name, modules in model.named_modules()
        if isinstance(modules, nn.ModuleList) and name.endswith("layers")
        for index in range(len(modules))
    ]
    for modules, index in layers:
        if config.compile:
            # The module keeps its name and its hooks; only its computation is compiled.
            modules[index].forward = torch.compile(modules[index].forward, dynamic=True)
        if config.activation_checkpointing:
            modules[index] = checkpoint_wrapper.checkpoint_wrapper(modules[index])
    if not is_sharded(config, mesh, offloads_parameters=offloads_parameters):
        return model
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None,
        reduce_dtype=torch.float32,
    )
    offload_policy = CPUOffloadPolicy() if offloads_parameters else OffloadPolicy()
    shards: list[nn.Module] = [*(modules[index] for modules, index in layers), model]
    for module in shards:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)
    if isinstance(model, PolicyModel):
        register_fsdp_forward_method(model, "compute_logits")
    return model


def gather_full_tensor(parameter: Tensor) -> Tensor:
    """Return a whole tensor, gathered from all ranks if it is sharded; then a collective."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def gather_parameters(
    parameters: Iterable[tuple[str, Tensor]], *, keeps_copies: bool = True
) -> dict[str, Tensor]:
    """Return copies of whole parameters on the CPU, by their names; a collective.

    The names lose the prefixes of activation checkpointing. With `keeps_copies = False`, a rank
    only takes part in the collective: its result is empty, and it needs no memory for copies.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in parameters:
        tensor = gather_full_tensor(parameter).detach()
        if keeps_copies:
            name = name.replace(checkpoint_wrapper._CHECKPOINT_PREFIX, "")
            state[name] = tensor.to("cpu", copy=True).contiguous()
    return state
