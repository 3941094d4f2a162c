"""The formula for the memory of learner ranks, compared with measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.trainer.setup.memory.learner import RankMemory
from tests.memory.shapes import measure_bench_shape

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "learner_memory.json"
PHASES = ("construction", "step", "publish", "save", "export", "load")
NUM_MICRO_BATCHES, NUM_TOKENS = 8, 6
"""Sizes of a step in bench/learner_memory.py, on each rank."""


def load_measured_runs() -> list[Any]:
    """Return the runs in which the C library returned freed memory at once."""
    results = json.loads(RESULTS.read_text("utf-8"))
    return [run for run in results["runs"] if run["frees_at_once"]]


def describe_run(run: Any) -> str:
    return f"{run['num_parameters'] // 10**6}M-{run['num_ranks']}"


def make_bench_run(num_ranks: int) -> LanguageModelRun:
    """Return the run of bench/learner_memory.py."""
    return LanguageModelRun.model_validate(
        {
            "learner": {
                "num_ranks": num_ranks,
                "dtype": "bfloat16",
                "max_tokens_per_micro_batch": NUM_TOKENS,
                "packing": "pad",
                "activation_checkpointing": True,
                "memory": {"reduce_gradients": "each"},
            },
            "rollout": {"max_tokens": NUM_TOKENS, "max_completion_tokens": 3, "group_size": 2},
            "training": {"groups_per_step": NUM_MICRO_BATCHES * num_ranks // 2},
        }
    )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("measured_run", load_measured_runs(), ids=describe_run)
def test_formula_is_within_a_tenth_of_the_measured_peak(measured_run: Any, phase: str) -> None:
    num_layers = {18: 3, 58: 12}[measured_run["num_parameters"] // 10**6]
    shape = measure_bench_shape(num_layers)
    assert shape.num_parameters == measured_run["num_parameters"]
    memory = RankMemory(make_bench_run(measured_run["num_ranks"]), shape)
    estimate = {
        "construction": memory.construction_bytes,
        "step": lambda: memory.step_bytes(NUM_TOKENS),
        "publish": memory.publish_bytes,
        "save": memory.save_bytes,
        "export": memory.export_bytes,
        "load": memory.load_bytes,
    }[phase]()
    assert estimate == pytest.approx(measured_run["max_peak_bytes"][phase], rel=0.1)
