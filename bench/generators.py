"""Compare the completions per second of the engines on this machine: `make bench`.

Each engine runs in a separate process with one thread and samples two tokens for the same 512
prompts of blackjack. The engines alternate, so that a slow phase of the machine affects both. One
workload has different prompts only; the other has four episodes per seed, as in training. The
default engine on a CPU is the faster engine of the second workload.
"""

from __future__ import annotations

import itertools
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "generators.json"
NUM_PROMPTS = 512
NUM_ROUNDS = 5
PROMPT_TOKENS = 20
NEW_TOKENS = 2
ENGINES = ("transformers", "vllm")
WORKLOADS = {"all different": 1, "four of each": 4}


@dataclass(frozen=True)
class Result:
    """Completions per second of an engine, one sample per round."""

    engine: str
    workload: str
    samples: list[float]

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)


def measure(engine_name: str, model_path: str) -> None:
    """Write the completions per second for each workload that standard input names."""
    from ludus.trainer.rollout.engines.vllm_process import prepare_process

    prepare_process(num_threads=1)
    import torch

    from ludus.proto.config import load_run_config
    from ludus.trainer.core.interfaces import EngineRequest
    from ludus.trainer.core.types import Sampling
    from ludus.trainer.models.chat import ChatTokenizer
    from ludus.trainer.rollout.engines.async_engine import make_engine

    torch.set_num_threads(1)
    run = load_run_config(None, [f"generator.kind={engine_name}", "rollout.max_tokens=64"])
    chat = ChatTokenizer.load(model_path, run.model)
    engine = make_engine(run, model_path, chat)
    sampling = Sampling(temperature=1.0, max_tokens=NEW_TOKENS)
    draw = random.Random(0)
    next_id = 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        copies = WORKLOADS[line.strip()]
        prompts = [
            [draw.randrange(5, 250) for _ in range(PROMPT_TOKENS)]
            for _ in range(NUM_PROMPTS // copies)
        ] * copies
        started = time.perf_counter()
        for prompt in prompts:
            engine.submit(EngineRequest(next_id, prompt, sampling, seed=next_id))
            next_id += 1
        while engine.has_work:
            engine.step()
        sys.stdout.write(f"{NUM_PROMPTS / (time.perf_counter() - started)}\n")
        sys.stdout.flush()
    engine.close()


def compare() -> list[Result]:
    """Measure all engines on all workloads in turn and return the results."""
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(Path(folder))
        processes = {
            engine: subprocess.Popen(
                [sys.executable, __file__, engine, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for engine in ENGINES
        }
        for process in processes.values():
            request_line(process)
        samples: dict[tuple[str, str], list[float]] = {}
        rounds = range(NUM_ROUNDS + 1)
        for number, workload, engine in itertools.product(rounds, WORKLOADS, ENGINES):
            rate = float(request_line(processes[engine], workload))
            if number > 0:  # the first round warms up
                samples.setdefault((engine, workload), []).append(rate)
        for process in processes.values():
            process.communicate()
    return [Result(engine, workload, values) for (engine, workload), values in samples.items()]


def request_line(process: subprocess.Popen[str], workload: str = "") -> str:
    """Send a workload to a process and return its next line of output."""
    assert process.stdin is not None and process.stdout is not None
    if workload:
        process.stdin.write(f"{workload}\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        sys.exit(f"an engine's process exited early with code {process.wait()}")
    return line


def make_model_folder(folder: Path) -> None:
    """Write the example's model with random weights."""
    from ludus.proto.config import TinyModel
    from ludus.trainer.models.tiny import make_model, make_tokenizer, save

    config = TinyModel(width=64, num_heads=2, intermediate=128, max_tokens=256)
    tokenizer = make_tokenizer(["hard 16 vs 10", "HIT", "STAND"], config.vocab_size)
    save(make_model(config, tokenizer, seed=0), tokenizer, folder)


def main() -> None:
    """Measure, print a table and save every sample."""
    results = compare()
    for result in results:
        print(
            f"{result.engine:>13}, prompts {result.workload:<14}"
            f"{result.median:8.0f} answers/s  (min {min(result.samples):.0f}, "
            f"max {max(result.samples):.0f})"
        )
    medians = {(result.engine, result.workload): result.median for result in results}
    ratios = {
        workload: medians["transformers", workload] / medians["vllm", workload]
        for workload in WORKLOADS
    }
    print("transformers / vllm: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps(
            {
                "machine": {"processor": platform.machine(), "python": platform.python_version()},
                "settings": {
                    "num_prompts": NUM_PROMPTS,
                    "prompt_tokens": PROMPT_TOKENS,
                    "new_tokens": NEW_TOKENS,
                    "threads": 1,
                },
                "results": [asdict(result) for result in results],
                "ratios": ratios,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], sys.argv[2])
    else:
        main()
