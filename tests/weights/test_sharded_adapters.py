"""Adapters of a model that is sharded over two ranks are trained and gathered completely."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, Qwen2ForCausalLM

from ludus.proto.config import LearnerConfig
from ludus.trainer.learner.lora import (
    add_adapters,
    merge_adapters,
    set_adapters_enabled,
)
from ludus.trainer.learner.model import gather_parameters, prepare_model
from ludus.trainer.learner.process_group import leave_process_group
from tests.weights.test_adapters import LORA_CONFIG, TOKEN_IDS, make_model

NUM_RANKS = 2


class Scorer(nn.Module):
    """A module that returns the log-probs of the tokens of TOKEN_IDS; FSDP needs one module."""

    def __init__(self, language_model: PreTrainedModel) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probs [T - 1]."""
        logits = self.language_model(input_ids=ids, use_cache=False).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1).clone()


def train_rank(rank: int, folder: str) -> None:
    """Train adapters on one rank, and leave the process group."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=NUM_RANKS)
    train_adapters(rank, folder)
    leave_process_group()


def train_adapters(rank: int, folder: str) -> None:
    """Train; rank 0 saves log-probs and weights."""
    model = Qwen2ForCausalLM.from_pretrained(f"{folder}/base")
    torch.manual_seed(1)
    add_adapters(model, LORA_CONFIG)
    settings = LearnerConfig(activation_checkpointing=True)
    policy = prepare_model(Scorer(model), settings, init_device_mesh("cpu", (NUM_RANKS,)))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(
        [parameter for parameter in policy.parameters() if parameter.requires_grad], lr=3e-2
    )
    for _ in range(4):
        (-policy(TOKEN_IDS).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logprobs, weights = policy(TOKEN_IDS), gather_parameters(model.named_parameters())
        set_adapters_enabled(policy, False)
        base_logprobs = policy(TOKEN_IDS)
    if rank == 0:
        torch.save((logprobs, base_logprobs, weights), f"{folder}/outcome.pt")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_of_a_sharded_model_are_gathered_completely(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "base")
    mp.spawn(train_rank, args=(str(tmp_path),), nprocs=NUM_RANKS)
    logprobs, base_logprobs, weights = torch.load(tmp_path / "outcome.pt")
    scorer = Scorer(make_model())
    with torch.no_grad():
        torch.testing.assert_close(scorer(TOKEN_IDS), base_logprobs, atol=1e-5, rtol=0)
        merged_weights = merge_adapters(weights, LORA_CONFIG)
        scorer.language_model.load_state_dict(merged_weights, strict=False)
        torch.testing.assert_close(scorer(TOKEN_IDS), logprobs, atol=1e-5, rtol=0)
    assert (logprobs - base_logprobs).abs().max() > 0.1
