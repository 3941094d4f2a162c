"""The policy as a torch module: rows of tokens in, log-probs of the sampled ones out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX,
    checkpoint_wrapper,
)
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
from ludus.trainer.algorithms.logits import entropy
from ludus.trainer.learner.micro_batches import PackedRows
from ludus.trainer.learner.packing import RowCosts

VALUE_HEAD = "value_head"

_Module = TypeVar("_Module", bound=nn.Module)

Entropy = Literal["none", "value", "gradient"]
"""What is wanted of the entropy; its gradient costs more than its value."""


class PolicyOutput(NamedTuple):
    """What a policy says of rows. A tuple, so that FSDP finds the tensors in it.

    Shapes: E = sampled tokens that differ, N = samples.
    """

    logprobs: Tensor
    """float32 [E] of the sampled tokens."""
    entropies: Tensor | None
    """float32 [E] of the distribution that each was sampled from."""
    values: Tensor | None
    """float32 [E] before each was sampled; None without a value head."""
    last_values: Tensor | None
    """float32 [N] after each sample's last token."""


class Policy(nn.Module):
    """A causal language model that answers with log-probs of sampled tokens."""

    def __init__(self, language_model: PreTrainedModel, *, value_head: bool = False) -> None:
        super().__init__()
        self.language_model = language_model
        self.value_head: nn.Linear | None = None
        if value_head:
            self.value_head = nn.Linear(language_model.config.hidden_size, 1)
            # A critic that knows nothing says so, and does not move the policy at first.
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(
        self, rows: PackedRows, temperature: float, wanted_entropy: Entropy = "none"
    ) -> PolicyOutput:
        """Log-probs, and values where there is a value head, of what was sampled in `rows`."""
        with _only_at(self.language_model.get_output_embeddings(), rows.positions) as hidden:
            logits = self.language_model(
                input_ids=rows.token_ids,
                attention_mask=None if rows.ends is None else ancestors(rows.ends),
                position_ids=None if rows.ends is None else rows.depths,
                use_cache=False,
            ).logits[0]
        logits = logits.float() if temperature == 1 else logits.float() / temperature
        all_logprobs = logits.log_softmax(-1)
        before = rows.position_of_target
        # Indexed in one dimension: the gradient of a two-dimensional index is several times slower.
        logprobs = all_logprobs.flatten().index_select(
            0, before * all_logprobs.shape[1] + rows.targets
        )
        entropies = None
        if wanted_entropy != "none":
            of_all = all_logprobs if wanted_entropy == "gradient" else all_logprobs.detach()
            entropies = entropy(of_all).index_select(0, before)
        values = last_values = None
        if self.value_head is not None:
            positions = torch.cat([rows.positions, rows.last_positions])
            output = self.value_head(hidden[0].index_select(0, positions)).float().squeeze(-1)
            values = output[: len(rows.positions)].index_select(0, before)
            last_values = output[len(rows.positions) :]
        return PolicyOutput(logprobs, entropies, values, last_values)

    def all_logits(self, token_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """float32 logits [B, S, V] of whole rows of tokens [B, S]."""
        logits: Tensor = self.language_model(
            input_ids=token_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).logits
        return logits.float()

    def full_names(self) -> dict[str, str]:
        """The Hugging Face name of each parameter of the language model."""
        return {
            name: name.removeprefix("language_model.").replace(_CHECKPOINT_PREFIX, "")
            for name, _ in self.named_parameters()
            if not name.startswith(VALUE_HEAD)
        }


def ancestors(ends: Tensor) -> Tensor:
    """bool [R, 1, L, L] True where the node of a column comes before, or is, the row's node."""
    positions = torch.arange(ends.shape[1], device=ends.device)
    earlier = positions <= positions[:, None]
    return (earlier & (positions[:, None] < ends[:, None, :]))[:, None]


def row_costs(language_model: PreTrainedModel) -> RowCosts:
    """Multiplications of a forward pass, which time follows closely on a CPU."""
    layers = [
        parameter.numel()
        for name, parameter in language_model.named_parameters()
        if parameter.dim() == 2 and ".layers." in name
    ]
    config = language_model.config
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    width = head_size * config.num_attention_heads
    return RowCosts(per_token=sum(layers), per_pair=2 * width * config.num_hidden_layers)


def prepare(
    policy: _Module, config: LearnerConfig, mesh: DeviceMesh, *, offload: bool = False
) -> _Module:
    """The model, ready to run: layers compiled or checkpointed, parameters sharded by FSDP2.

    One rank in float32 has nothing to shard or to cast, so it goes without: for a tiny model
    the hooks would cost a fifth of a step. With `offload` the parameters wait in main memory.
    """
    layers = [
        (modules, index)
        for name, modules in policy.named_modules()
        if isinstance(modules, nn.ModuleList) and name.endswith("layers")
        for index in range(len(modules))
    ]
    for modules, index in layers:
        if config.compile:
            # The module keeps its name and its hooks; only what it computes is compiled.
            modules[index].forward = torch.compile(modules[index].forward, dynamic=True)
        if config.activation_checkpointing:
            modules[index] = checkpoint_wrapper(modules[index])
    if mesh.size() == 1 and config.dtype == "float32" and not offload:
        return policy
    mixed = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None,
        reduce_dtype=torch.float32,
    )
    where = CPUOffloadPolicy() if offload else OffloadPolicy()
    for modules, index in layers:
        fully_shard(modules[index], mesh=mesh, mp_policy=mixed, offload_policy=where)
    fully_shard(policy, mesh=mesh, mp_policy=mixed, offload_policy=where)
    if isinstance(policy, Policy):
        register_fsdp_forward_method(policy, "all_logits")
    return policy


@contextmanager
def _only_at(head: nn.Module, positions: Tensor) -> Iterator[list[Tensor]]:
    """The list that gets the hidden states [R * L, width], of which the head sees `positions`.

    Logits are the largest tensor by far. Only the model itself knows what it does with them
    after the head, so it is the head's input that is cut down.
    """
    seen: list[Tensor] = []

    def select(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(args[0].flatten(0, 1))
        return (seen[0].index_select(0, positions)[None],)

    handle = head.register_forward_pre_hook(select)
    try:
        yield seen
    finally:
        handle.remove()


def full_state_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Copies on the CPU of whole parameters, by their Hugging Face names; a collective."""
    return {
        name.replace(_CHECKPOINT_PREFIX, ""): full_tensor(parameter)
        for name, parameter in model.named_parameters()
    }


def full_tensor(parameter: Tensor) -> Tensor:
    """A copy on the CPU of the whole of a parameter that may be sharded; a collective."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().to("cpu", copy=True).contiguous()
