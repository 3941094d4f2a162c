"""Measure the private memory of each learner rank at several model sizes and numbers of ranks.

    python bench/learner_memory.py                           100, 200 and 300 M parameters
    python bench/learner_memory.py --sizes 20 --ranks 1 2    in millions of parameters

Each model has random weights, in bfloat16 like published models. Ranks are processes with gloo on
this machine. For each phase (construction, a training step with eight micro-batches, gathering and
casting of the weights to publish, saving and loading of a checkpoint, export), the peak of the
memory that no file backs (RssAnon) is compared with its value before construction. With n
parameters and R ranks, the share of a rank is 4n/R bytes of weights, or 16n/R with gradients and
the state of AdamW.

The C library keeps freed blocks below 32 MB for later, and so more than the tensors need. Each size
is measured with an environment variable with which the C library returns memory at once, and
without the variable. Prints a table and writes bench/results/learner_memory.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

from ludus.proto.config import GrpoConfig, LanguageModelRun, LearnerConfig, LearnerMemoryConfig
from ludus.trainer.core.types import Batch, Coefficients, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.learner import Learner
from ludus.trainer.learner.process_group import leave_process_group
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.weights.payload import cast_floats

RESULTS = Path(__file__).parent / "results" / "learner_memory.json"
PHASES = ("construction", "step", "publish", "save", "export", "load")
NUM_MICRO_BATCHES, NUM_TOKENS = 8, 6
VOCAB_SIZE, WIDTH, INTERMEDIATE = 4096, 640, 1792
COEFFICIENTS = Coefficients(learning_rate=1e-5, entropy=0.0, kl=0.0)
SAMPLE_INTERVAL_S = 0.004
MALLOC_VARIABLE, MALLOC_VALUE = "MALLOC_MMAP_THRESHOLD_", str(2**17)
"""Setting of the C library with which it returns larger freed blocks to the system at once."""


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[100.0, 200.0, 300.0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments = parser.parse_args()
    columns = "".join(f"{phase:>22}" for phase in PHASES)
    sys.stdout.write(f"{'parameters':>11} {'ranks':>5}{columns}   MB, (x 4n/R, x 16n/R)\n")
    sys.stdout.write("rows with a * are those in which the C library returns memory at once\n")
    runs = []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            num_parameters = make_model_folder(Path(folder) / "model", size * 1e6)
            make_model_folder(Path(folder) / "small", 0)
            for num_ranks, frees_at_once in product(arguments.ranks, (True, False)):
                with set_malloc_variable(frees_at_once):
                    peaks = measure(Path(folder), num_ranks, arguments.dtype)
                run = make_run(num_parameters, num_ranks, peaks)
                runs.append({"frees_at_once": frees_at_once, **run})
                sys.stdout.write(format_row(runs[-1]))
                sys.stdout.flush()
    command = " ".join(["python", "bench/learner_memory.py", *sys.argv[1:]])
    machine.write_runs(
        RESULTS, command, runs, machine=machine.setting()["machine"], dtype=arguments.dtype
    )


@contextmanager
def set_malloc_variable(is_set: bool) -> Iterator[None]:
    """Set or remove the variable for processes that start in the block."""
    os.environ.pop(MALLOC_VARIABLE, None)
    if is_set:
        os.environ[MALLOC_VARIABLE] = MALLOC_VALUE
    try:
        yield
    finally:
        os.environ.pop(MALLOC_VARIABLE, None)


def make_model_folder(folder: Path, num_parameters: float) -> int:
    """Create a model of about this size, with at least one layer; return its exact size."""
    torch.manual_seed(0)
    head_parameters = 2 * VOCAB_SIZE * WIDTH
    layer_parameters = WIDTH * (2 * WIDTH + 2 * WIDTH // 5 + 3 * INTERMEDIATE)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=max(1, round((num_parameters - head_parameters) / layer_parameters)),
        num_attention_heads=10,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer(["hard 16 vs 10", "HIT"] * 10, 300).save_pretrained(folder)
    return int(model.num_parameters())


def measure(folder: Path, num_ranks: int, dtype: str) -> list[dict[str, int]]:
    """Return the peak in bytes of each phase, by rank."""
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        mp.spawn(measure_rank, args=(str(folder), run_folder, num_ranks, dtype), nprocs=num_ranks)
        return [torch.load(f"{run_folder}/peaks-{rank}") for rank in range(num_ranks)]


def measure_rank(rank: int, folder: str, run_folder: str, num_ranks: int, dtype: str) -> None:
    """Write the peaks of this rank to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{run_folder}/store", rank=rank, world_size=num_ranks
    )
    # The first learner imports modules and fills caches, which do not depend on the model.
    run_phases(Path(folder) / "small", Path(run_folder) / "small", dtype)
    peaks = run_phases(Path(folder) / "model", Path(run_folder) / "model", dtype)
    torch.save(peaks, f"{run_folder}/peaks-{rank}")
    leave_process_group()


def run_phases(model_path: Path, folder: Path, dtype: str) -> dict[str, int]:
    """Return the peak of each phase in bytes above the start; a collective."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    start_bytes = read_private_bytes()
    peaks: dict[str, int] = {}

    @contextmanager
    def measure_phase(name: str) -> Iterator[None]:
        # Memory that earlier phases freed does not count.
        ctypes.CDLL(None).malloc_trim(0)
        dist.barrier()
        with sample_private_bytes() as samples:
            yield
        peaks[name] = max(samples) - start_bytes

    with measure_phase("construction"):
        learner = make_learner(str(model_path), dtype)
    batch = make_batch(dist.get_world_size())
    # The first step creates the state of AdamW.
    learner.train_step(batch, COEFFICIENTS)
    with measure_phase("step"):
        learner.train_step(batch, COEFFICIENTS)
    with measure_phase("publish"):
        cast_floats(learner.gather_weights(), dtype)
    with measure_phase("save"):
        learner.save(folder / "state")
    with measure_phase("export"):
        learner.export_model(folder / "model")
    del learner
    gc.collect()
    learner = make_learner(str(model_path), dtype)
    with measure_phase("load"):
        learner.load(folder / "state")
    return peaks


def make_learner(model_path: str, dtype: str) -> Learner:
    """Build the learner of this rank; each row is a micro-batch."""
    run = LanguageModelRun()
    learner = LearnerConfig(
        num_ranks=dist.get_world_size(),
        learning_rate=COEFFICIENTS.learning_rate,
        dtype="float32" if dtype == "float32" else "bfloat16",
        max_tokens_per_micro_batch=NUM_TOKENS,
        packing="pad",
        activation_checkpointing=True,
        memory=LearnerMemoryConfig(reduce_gradients="each"),
    )
    settings = {"learner": learner, "algorithm": GrpoConfig(geometric_mask=None), "seed": 0}
    return Learner(run.model_copy(update=settings), model_path)


def make_batch(num_ranks: int) -> Batch:
    """Return a batch with a row for each micro-batch of each rank."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(NUM_MICRO_BATCHES * num_ranks):
        token_ids = torch.randint(5, VOCAB_SIZE, (NUM_TOKENS,), generator=generator).tolist()
        mask = [position >= NUM_TOKENS // 2 for position in range(NUM_TOKENS)]
        advantage = float(torch.randn((), generator=generator))
        samples.append(
            TrainingSample(
                token_ids,
                mask,
                [-8.3 * is_sampled for is_sampled in mask],
                advantages=[advantage * is_sampled for is_sampled in mask],
                rewards=[0.0] * NUM_TOKENS,
                terminated=True,
            )
        )
    return collate(samples)


@contextmanager
def sample_private_bytes() -> Iterator[list[int]]:
    """Append the private memory of this process in bytes to the yielded list."""
    samples = [read_private_bytes()]
    is_done = threading.Event()

    def sample() -> None:
        while not is_done.is_set():
            samples.append(read_private_bytes())
            time.sleep(SAMPLE_INTERVAL_S)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_done.set()
        thread.join()
        samples.append(read_private_bytes())


def read_private_bytes() -> int:
    """Return the memory of this process that no file backs, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def make_run(num_parameters: int, num_ranks: int, peaks: list[dict[str, int]]) -> dict[str, Any]:
    """Return the result for a size and a number of ranks."""
    max_peaks = {phase: max(rank_peaks[phase] for rank_peaks in peaks) for phase in PHASES}
    share = num_parameters / num_ranks
    return {
        "num_parameters": num_parameters,
        "num_ranks": num_ranks,
        "peak_bytes": {phase: [rank_peaks[phase] for rank_peaks in peaks] for phase in PHASES},
        "max_peak_bytes": max_peaks,
        "ratio_to_4n_per_rank": {phase: peak / (4 * share) for phase, peak in max_peaks.items()},
        "ratio_to_16n_per_rank": {phase: peak / (16 * share) for phase, peak in max_peaks.items()},
    }


def format_row(run: dict[str, Any]) -> str:
    """Return the row of a result in the table."""
    cells = [
        f"{run['max_peak_bytes'][phase] / 1e6:,.0f} ({run['ratio_to_4n_per_rank'][phase]:.2f}, "
        f"{run['ratio_to_16n_per_rank'][phase]:.2f})"
        for phase in PHASES
    ]
    columns = "".join(f"{cell:>22}" for cell in cells)
    mark = "*" if run["frees_at_once"] else " "
    return f"{run['num_parameters'] / 1e6:>8,.0f} M{mark} {run['num_ranks']:>5}{columns}\n"


if __name__ == "__main__":
    main()
