"""Learning rates, compared with the schedules of transformers, which TRL uses."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import get_scheduler

from ludus.proto.config import LanguageModelRun
from ludus.trainer.run.schedule import compute_coefficients

NAMES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def list_upstream_rates(
    name: str, peak: float, num_warmup_steps: int, num_steps: int
) -> list[float]:
    """Return the rates before each of the steps 0 to num_steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps, num_steps)
    rates = []
    for _ in range(num_steps + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.slow
@pytest.mark.parametrize("schedule", NAMES)
def test_learning_rates_equal_those_of_transformers(schedule: str) -> None:
    """Ludus has two differences: no step has the rate 0 of a warm-up, and the last step has the
    final rate, which transformers reaches after the last step.
    """
    for seed in range(200):
        generator = random.Random(seed)
        num_steps = generator.randint(3, 40)
        num_warmup_steps = generator.choice([0, 1, generator.randint(0, num_steps - 2)])
        peak = 10 ** generator.uniform(-7, -1)
        final_rate = 0.0 if schedule != "constant" else None
        run = LanguageModelRun.model_validate(
            {
                "learner": {
                    "learning_rate": peak,
                    "schedule": schedule,
                    "warmup_steps": num_warmup_steps,
                    **({} if final_rate is None else {"learning_rate_final": final_rate}),
                },
                "training": {"num_steps": num_steps},
            }
        )
        rates = [compute_coefficients(run, step).learning_rate for step in range(num_steps)]
        upstream = list_upstream_rates(NAMES[schedule], peak, num_warmup_steps, num_steps - 1)
        expected = upstream[1 : num_warmup_steps + 1] + upstream[num_warmup_steps:num_steps]
        assert rates == pytest.approx(expected, rel=1e-9, abs=1e-9 * peak)
