"""Program that computes losses and their gradients with TRL's own GRPOTrainer._compute_loss.

Argument: a JSON file with cases. Prints a list of [loss, gradient of the log-probs], as JSON.
"""

import collections
import json
import pathlib
import sys
from types import SimpleNamespace

import torch
from trl import GRPOTrainer


class Accelerator:
    """The part of an accelerator that one process uses."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values):
        return values

    def reduce(self, values, reduction):
        return values


def make_trainer(case, logprobs):
    """Return the attributes of a trainer that the loss reads."""
    is_gspo = case["loss_type"] == "gspo"
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, logprobs * 0, None),
        accelerator=Accelerator(),
        args=SimpleNamespace(
            delta=case["dual_clip"], use_bias_correction_kl=False, steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if is_gspo else "token",
        loss_type="grpo" if is_gspo else case["loss_type"],
        epsilon_low=case["clip_low"],
        # CISPO's bound is the ratio itself.
        epsilon_high=case["clip_high"] + (case["loss_type"] == "cispo"),
        beta=case["kl_coef"],
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        max_completion_length=case["max_tokens"],
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
    )


def compute_loss(case):
    """Return the loss and the gradient of the log-probs."""
    dtype = getattr(torch, case["dtype"])
    logprobs = torch.tensor(case["logprobs"], dtype=dtype, requires_grad=True)
    ids = torch.zeros(logprobs.shape, dtype=torch.int64)
    mask = torch.tensor(case["mask"], dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(case["advantages"], dtype=dtype),
        "old_per_token_logps": torch.tensor(case["old_logprobs"], dtype=dtype),
        "ref_per_token_logps": torch.tensor(case["ref_logprobs"], dtype=dtype),
        "importance_sampling_ratio": torch.tensor(case["weights"], dtype=dtype),
        "num_items_in_batch": mask.sum(),
    }
    if case["loss_type"] == "gspo":
        # One weight for each sequence, as in TRL's modes for sequences.
        inputs["importance_sampling_ratio"] = inputs["importance_sampling_ratio"][:, :1]
    loss = GRPOTrainer._compute_loss(make_trainer(case, logprobs), None, inputs)
    loss.backward()
    return [float(loss.detach()), logprobs.grad.tolist()]


cases = json.loads(pathlib.Path(sys.argv[1]).read_text())
sys.stdout.write(json.dumps([compute_loss(case) for case in cases]))
