"""Measure the memory and time of attention to packed trees, in blocks and with a dense mask.

    python bench/tree_attention.py
    python bench/tree_attention.py --lengths 512 1024 --no-memory

A model with 4 layers of width 256 and random weights computes hidden states of one row, a tree
whose branches have 128 tokens, and their gradients, in float32. Memory is the peak that no file
backs (RssAnon), above its value before, in a new process for each length; freed blocks return to
the system at once. `a L + b L^2` is fitted to it. Time is the minimum of several runs, both kinds
in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

import learner_memory
import machine
import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2Model

from ludus.trainer.learner.tree_attention import make_tree_mask, use_tree_attention

RESULTS = Path(__file__).parent / "results" / "tree_attention.json"
NUM_RUNS = 3


def main() -> None:
    """Measure, print tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--time-lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--no-memory", action="store_true")
    arguments = parser.parse_args()
    runs: list[dict[str, float]] = []
    for length in arguments.time_lengths:
        blocks_s, dense_s = measure_times(length)
        runs.append({"length": length, "blocks_s": blocks_s, "dense_s": dense_s})
        sys.stdout.write(f"{length:>6} tokens {blocks_s:.3f} s, dense {dense_s:.3f} s, ")
        sys.stdout.write(f"ratio {blocks_s / dense_s:.2f}\n")
        sys.stdout.flush()
    if not arguments.no_memory:
        runs += measure_memory(arguments.lengths)
    machine.write_runs(
        RESULTS, " ".join(["python", "bench/tree_attention.py", *sys.argv[1:]]), runs
    )


def measure_memory(lengths: list[int]) -> list[dict[str, float]]:
    """Return and print the peak for each length, and the share of the quadratic term."""
    peaks = []
    with learner_memory.set_malloc_variable(True):
        for length in lengths:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peaks.append(pool.apply(measure_peak, (length,)))
            sys.stdout.write(f"{length:>6} tokens {peaks[-1] / 1e6:,.0f} MB\n")
            sys.stdout.flush()
    sizes = np.array(lengths, dtype=float)
    columns = np.stack([sizes, sizes**2], axis=1)
    _, quadratic = np.linalg.lstsq(columns, np.array(peaks, dtype=float), rcond=None)[0]
    share = quadratic * sizes[-1] ** 2 / peaks[-1]
    sys.stdout.write(f"quadratic term at {lengths[-1]} tokens: {share:.1%}\n")
    return [{"length": n, "peak_bytes": peak} for n, peak in zip(lengths, peaks, strict=True)]


def measure_peak(length: int) -> int:
    """Return the peak in bytes above the memory before the step."""
    model = make_model(is_dense=False)
    run_step(model, 64)
    start_bytes = learner_memory.read_private_bytes()
    with learner_memory.sample_private_bytes() as samples:
        run_step(model, length)
    return max(samples) - start_bytes


def measure_times(length: int) -> tuple[float, float]:
    """Return the time of a step in seconds, in blocks and with a dense mask."""
    models = [make_model(is_dense=is_dense) for is_dense in (False, True)]
    times: list[list[float]] = [[], []]
    for _ in range(NUM_RUNS + 1):
        for model, model_times in zip(models, times, strict=True):
            start = time.perf_counter()
            run_step(model, length)
            model_times.append(time.perf_counter() - start)
    return min(times[0][1:]), min(times[1][1:])


def make_model(*, is_dense: bool) -> Qwen2Model:
    """Return a random model."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2Model(config)
    if not is_dense:
        use_tree_attention(model)
    return model


def make_ends(length: int) -> Tensor:
    """Return the ends of one tree: a prefix of half the row, and branches of 128 tokens."""
    nodes = torch.arange(length)
    branch_ends = torch.clamp((nodes // 128 + 1) * 128, max=length)
    return torch.where(nodes < length // 2, length, branch_ends)[None]


def run_step(model: Qwen2Model, length: int) -> None:
    """Compute the output and the gradients of one row."""
    ends = make_ends(length)
    output = model(
        input_ids=torch.arange(length)[None] % 512,
        attention_mask=make_tree_mask(model, ends),
        position_ids=torch.arange(length)[None],
        use_cache=False,
    ).last_hidden_state
    output.square().mean().backward()


if __name__ == "__main__":
    main()
