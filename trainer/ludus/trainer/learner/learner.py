"""One rank of the learner: a training step, the weights to publish, the state to keep.

Every method is a collective: all ranks call it with equal arguments, or all of them hang.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from ludus.proto.config import AlgorithmConfig, LearnerConfig
from ludus.proto.errors import CheckpointError
from ludus.trainer.algorithms.policy_loss import LossTerms, grpo_loss
from ludus.trainer.learner.micro_batches import MicroBatch, micro_batches, split_samples
from ludus.trainer.learner.model import Policy, ShardedPolicy, shard
from ludus.trainer.models.load import load_language_model
from ludus.trainer.types import Batch, Coefficients, Probe


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """What a learner rank is made from."""

    model_path: str
    config: LearnerConfig
    algorithm: AlgorithmConfig
    temperature: float
    """At which the rollout workers sample: log-probs are of that distribution."""
    max_tokens: int
    """Longest episode: the denominator of aggregation "constant"."""
    seed: int


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a training step did, over all its minibatches and ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    clip_ratio: float
    """Share of sampled tokens at which the clip held."""
    mismatch_kl: float
    """k3 of sampler from learner, mean per sampled token."""
    reference_kl: float
    masked_sequence_ratio: float
    num_tokens_trained: int
    """Sampled tokens in the loss."""
    num_tokens_forwarded: int
    """Tokens the model computed for it, padding included."""


class Learner:
    """The policy, its optimizer, and a reference model when the loss wants one."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._device = _device_of_rank(self._rank)
        torch.manual_seed(spec.seed)
        self._mesh = init_device_mesh(self._device.type, (self._num_ranks,))
        self._policy = self._load_policy()
        self._reference = self._load_policy() if spec.algorithm.kl_coef > 0 else None
        config = spec.config
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def train_step(self, batch: Batch, coefficients: Coefficients) -> StepMetrics:
        """What the step did; the policy has moved by one update per minibatch."""
        self._policy.train()
        for group in self._optimizer.param_groups:
            group["lr"] = coefficients.learning_rate
        parts = split_samples(batch, self._spec.config.num_minibatches)
        pieces = [self._cut(batch, samples) for samples in parts]
        # The first minibatch meets the weights unmoved: its ratio starts at 1 by itself.
        old = [None, *(self._old_logprobs(part) for part in pieces[1:])]
        terms, losses, grad_norms = _Sums(), [], []
        for samples, part, old_logprobs in zip(parts, pieces, old, strict=True):
            denominator = self._denominator(batch, samples)
            update = self._accumulate(part, old_logprobs, denominator, coefficients)
            grad_norms.append(self._apply_gradients())
            losses.append(update.loss)
            terms = terms + update
        num_forwarded = sum(piece.num_padded_tokens for part in pieces for piece in part)
        return self._metrics(terms, losses, grad_norms, coefficients, num_forwarded, batch)

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor]:
        """The policy's weights as full tensors on the CPU, by their Hugging Face names."""
        names = self._policy.full_names()
        return {
            names[name]: _full(parameter).cpu().contiguous()
            for name, parameter in self._policy.named_parameters()
        }

    @torch.no_grad()
    def answer_logprobs(self, probes: Sequence[Probe]) -> list[list[float]]:
        """The log-probs of each probe's completion under the policy, at temperature 1."""
        self._policy.eval()
        answers: list[list[float]] = []
        temperature, self._policy.temperature = self._policy.temperature, 1.0
        for probe in probes:
            ids = torch.tensor([probe.prompt_ids + probe.completion_ids], device=self._device)
            sampled = torch.zeros_like(ids, dtype=torch.bool)
            sampled[:, len(probe.prompt_ids) :] = True
            logprobs, _ = self._policy(ids, sampled)
            answers.append(logprobs[0, len(probe.prompt_ids) :].tolist())
        self._policy.temperature = temperature
        return answers

    def save(self, folder: Path) -> None:
        """Nothing; writes weights, optimizer and random state, each rank its part."""
        dcp.save(self._state(), checkpoint_id=folder)

    def export_model(self, folder: Path) -> None:
        """Nothing; rank 0 writes the policy as a folder that any Hugging Face loader reads."""
        state = self.full_state()
        if self._rank == 0:
            self._policy.language_model.config.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self._spec.model_path).save_pretrained(folder)
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    def load(self, folder: Path) -> None:
        """Nothing; goes on from what `save` wrote, also with another number of ranks.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
        """
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=folder)
        except (CheckpointException, RuntimeError, OSError) as error:
            failures = getattr(error, "failures", {})
            reason = next((repr(failure[0]) for failure in failures.values()), str(error))
            raise CheckpointError(
                f"checkpoint '{folder}' cannot be read: {reason}; it must be whole, and come "
                "from a run with the same model"
            ) from error
        set_state_dict(
            self._policy,
            self._optimizer,
            model_state_dict=state["policy"],
            optim_state_dict=state["optimizer"],
        )
        torch.set_rng_state(state["torch_random"])

    def _load_policy(self) -> ShardedPolicy:
        language_model = load_language_model(self._spec.model_path).to(self._device)
        policy = Policy(language_model, self._spec.temperature)
        return shard(policy, self._spec.config, self._mesh)

    def _state(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self._policy, self._optimizer)
        return {
            "policy": model_state,
            "optimizer": optimizer_state,
            "torch_random": torch.get_rng_state(),
        }

    def _cut(self, batch: Batch, samples: np.ndarray) -> list[MicroBatch]:
        return micro_batches(
            batch,
            samples,
            max_tokens=self._spec.config.max_tokens_per_micro_batch,
            rank=self._rank,
            num_ranks=self._num_ranks,
        )

    @torch.no_grad()
    def _old_logprobs(self, pieces: Sequence[MicroBatch]) -> list[Tensor] | None:
        """[N, T] for each piece, under the weights at the start of the step."""
        if self._spec.algorithm.old_logprobs == "rollout":
            return None
        return [self._forward(self._policy, piece)[0] for piece in pieces]

    def _forward(self, policy: Policy, piece: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the samples, each [N, T]: equal sequences run once."""
        token_ids, sampled = piece.token_ids.to(self._device), piece.sampled.to(self._device)
        logprobs, entropies = policy(token_ids, sampled)
        rows = piece.row_of_sample.to(self._device)
        return logprobs[rows], entropies[rows]

    def _accumulate(
        self,
        pieces: Sequence[MicroBatch],
        old_logprobs: Sequence[Tensor] | None,
        denominator: float,
        coefficients: Coefficients,
    ) -> _Sums:
        """Sums over the pieces and all ranks; the gradients wait in the parameters."""
        sums = _Sums()
        for index, piece in enumerate(pieces):
            self._policy.set_requires_gradient_sync(index == len(pieces) - 1)
            old = old_logprobs[index] if old_logprobs is not None else None
            terms = self._loss_terms(piece, old, denominator, coefficients)
            # FSDP averages gradients over ranks; the denominator has already counted them all.
            (terms.loss * self._num_ranks).backward()
            sums = sums + _Sums.of(terms)
        return sums.over_ranks(self._device)

    def _loss_terms(
        self,
        piece: MicroBatch,
        old: Tensor | None,
        denominator: float,
        coefficients: Coefficients,
    ) -> LossTerms:
        logprobs, entropies = self._forward(self._policy, piece)
        rollout = piece.rollout_logprobs.to(self._device)
        bypass = self._spec.algorithm.old_logprobs == "rollout"
        return grpo_loss(
            logprobs=logprobs,
            old_logprobs=rollout if bypass else old,
            rollout_logprobs=rollout,
            ref_logprobs=self._reference_logprobs(piece) if coefficients.kl else None,
            entropy=entropies,
            advantages=piece.advantages.to(self._device),
            loss_mask=piece.sampled.to(self._device)[piece.row_of_sample.to(self._device)],
            config=self._spec.algorithm,
            denominator=denominator,
            entropy_coef=coefficients.entropy,
            kl_coef=coefficients.kl,
        )

    @torch.no_grad()
    def _reference_logprobs(self, piece: MicroBatch) -> Tensor:
        assert self._reference is not None
        return self._forward(self._reference, piece)[0]

    def _denominator(self, batch: Batch, samples: np.ndarray) -> float:
        """Of the whole optimizer step: every rank counts all samples, not only its own."""
        how = self._spec.algorithm.aggregation
        if how == "token_mean":
            lengths = np.array([int(mask.sum()) for mask in batch.loss_masks])
            return float(lengths[batch.sequence_of_sample[samples]].sum())
        return float(len(samples) * (self._spec.max_tokens if how == "constant" else 1))

    def _apply_gradients(self) -> float:
        """The gradient's norm before clipping.

        Raises:
            FloatingPointError: the gradient is not finite; the step has not been taken.
        """
        parameters = [p for p in self._policy.parameters() if p.grad is not None]
        total = torch.nn.utils.clip_grad_norm_(parameters, self._spec.config.max_grad_norm)
        norm = float(_full(total))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm}; lower learner.learning_rate or "
                "learner.max_grad_norm, and look at mismatch_kl in metrics.jsonl"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _metrics(
        self,
        sums: _Sums,
        losses: Sequence[float],
        grad_norms: Sequence[float],
        coefficients: Coefficients,
        num_forwarded: int,
        batch: Batch,
    ) -> StepMetrics:
        num_tokens = max(sums.num_tokens, 1.0)
        return StepMetrics(
            loss=float(np.mean(losses)),
            grad_norm=float(np.mean(grad_norms)),
            learning_rate=coefficients.learning_rate,
            entropy=sums.entropy / num_tokens,
            clip_ratio=sums.num_clipped / num_tokens,
            mismatch_kl=sums.mismatch_kl / num_tokens,
            reference_kl=sums.reference_kl / num_tokens,
            masked_sequence_ratio=sums.num_masked_sequences / max(batch.num_samples, 1),
            num_tokens_trained=int(sums.num_tokens),
            num_tokens_forwarded=num_forwarded * self._num_ranks,
        )


@dataclass(frozen=True, slots=True)
class _Sums:
    """What LossTerms add up to over pieces, ranks and minibatches."""

    loss: float = 0.0
    num_tokens: float = 0.0
    num_clipped: float = 0.0
    num_masked_sequences: float = 0.0
    entropy: float = 0.0
    reference_kl: float = 0.0
    mismatch_kl: float = 0.0

    @classmethod
    def of(cls, terms: LossTerms) -> _Sums:
        """The sums of one piece."""
        return cls(
            *(
                float(value.detach())
                for value in (
                    terms.loss,
                    terms.num_tokens,
                    terms.num_clipped_tokens,
                    terms.num_masked_sequences,
                    terms.entropy_sum,
                    terms.ref_kl_sum,
                    terms.mismatch_kl_sum,
                )
            )
        )

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def over_ranks(self, device: torch.device) -> _Sums:
        """The sums over all ranks; a collective."""
        values = torch.tensor(
            [getattr(self, field.name) for field in fields(self)], dtype=torch.float64
        ).to(device)
        dist.all_reduce(values)
        return _Sums(*values.tolist())


def _full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _device_of_rank(rank: int) -> torch.device:
    """The GPU that Ray gave this process, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())
