"""Compare the completions per second of the engines on this machine: `make bench`.

Each engine runs in a separate process with one thread and samples two tokens for the same 512
prompts of blackjack. The engines alternate, so that a slow phase of the machine affects both. One
workload has different prompts only; the other has four episodes per seed, as in training. The
default engine on a CPU is the faster engine of the second workload.

`--model FOLDER` measures the model in a folder instead, in tokens per second: groups of eight
completions of 16 to 64 tokens, for prompts of 50 to 70 tokens. `--baseline CHECKOUT` measures the
code of another checkout in turn, and prints the ratios. On a machine with other work, compare the
tokens per second of processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ludus.trainer.core.interfaces import EngineRequest

RESULTS = Path(__file__).parent / "results" / "generators.json"
MODEL_RESULTS = Path(__file__).parent / "results" / "model_generation.json"
ROOTS = ("trainer", "proto", "services", "envs/sdk", "envs")
NUM_PROMPTS = 512
NUM_ROUNDS = 5
PROMPT_TOKENS = 20
NEW_TOKENS = 2
ENGINES = ("transformers", "vllm")
WORKLOADS = {"all different": 1, "four of each": 4}
GROUP_WORKLOAD = "groups of eight"
GROUP_SIZE = 8


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


@dataclass(frozen=True)
class Rate:
    """Completions or tokens per second of one round."""

    per_second: float
    per_cpu_second: float


def measure(engine_name: str, model_path: str, num_threads: int, num_groups: int) -> None:
    """Write the rate for each workload that standard input names."""
    from ludus.trainer.rollout.engines.vllm_process import prepare_process

    prepare_process(num_threads=num_threads)
    import torch

    from ludus.proto.config import load_run_config
    from ludus.trainer.models.chat import ChatTokenizer
    from ludus.trainer.rollout.engines.async_engine import make_engine

    torch.set_num_threads(num_threads)
    run = load_run_config(None, [f"generator.kind={engine_name}", "rollout.max_tokens=256"])
    chat = ChatTokenizer.load(model_path, run.model)
    engine = make_engine(run, model_path, chat)
    draw = random.Random(0)
    next_id = 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        workload = line.strip()
        if workload == GROUP_WORKLOAD:
            requests = make_groups(draw, next_id, num_groups)
        else:
            requests = make_prompts(draw, next_id, WORKLOADS[workload])
        next_id += len(requests)
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for request in requests:
            engine.submit(request)
        num_tokens = 0
        while engine.has_work:
            num_tokens += sum(len(output.token_ids) for output in engine.step())
        duration_s = time.perf_counter() - started_s
        cpu_s = time.process_time() - started_cpu_s
        amount = num_tokens if workload == GROUP_WORKLOAD else len(requests)
        sys.stdout.write(f"{amount / duration_s} {amount / cpu_s}\n")
        sys.stdout.flush()
    engine.close()


def make_prompts(draw: random.Random, first_id: int, num_copies: int) -> list[EngineRequest]:
    """Return requests for two tokens each, with so many copies of each prompt."""
    from ludus.trainer.core.interfaces import EngineRequest
    from ludus.trainer.core.types import Sampling

    sampling = Sampling(temperature=1.0, max_tokens=NEW_TOKENS)
    prompts = [
        [draw.randrange(5, 250) for _ in range(PROMPT_TOKENS)]
        for _ in range(NUM_PROMPTS // num_copies)
    ] * num_copies
    return [
        EngineRequest(request_id, prompt, sampling, seed=request_id)
        for request_id, prompt in enumerate(prompts, first_id)
    ]


def make_groups(draw: random.Random, first_id: int, num_groups: int) -> list[EngineRequest]:
    """Return groups of requests with one prompt each; prompts and completions differ in length."""
    from ludus.trainer.core.interfaces import EngineRequest
    from ludus.trainer.core.types import Sampling

    requests: list[EngineRequest] = []
    for _ in range(num_groups):
        prompt = [draw.randrange(300, 20_000) for _ in range(draw.randint(50, 70))]
        for _ in range(GROUP_SIZE):
            request_id = first_id + len(requests)
            sampling = Sampling(temperature=1.0, max_tokens=draw.randint(16, 64))
            requests.append(EngineRequest(request_id, prompt, sampling, seed=request_id))
    return requests


def start_process(
    engine: str, folder: str, num_threads: int, num_groups: int, checkout: Path | None = None
) -> subprocess.Popen[str]:
    """Start a process that measures an engine, with another checkout if there is one."""
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join(str(checkout / root) for root in ROOTS)
    arguments = ["--measure", engine, "--model", folder]
    arguments += ["--threads", str(num_threads), "--groups", str(num_groups)]
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def compare_on_model(options: argparse.Namespace) -> None:
    """Measure the engines on a model folder, each with both checkouts in turn; save all rates."""
    rates: dict[str, list[Rate]] = {}
    for engine in options.engines:
        processes = {engine: start_process(engine, options.model, options.threads, options.groups)}
        if options.baseline is not None:
            processes[f"{engine}, baseline"] = start_process(
                engine, options.model, options.threads, options.groups, options.baseline
            )
        for process in processes.values():
            request_line(process)
        for _, (name, process) in itertools.product(range(options.rounds), processes.items()):
            numbers = map(float, request_line(process, GROUP_WORKLOAD).split())
            rate = Rate(*numbers)
            rates.setdefault(name, []).append(rate)
            print(f"{name}: {rate.per_second:.1f} tokens/s, {rate.per_cpu_second:.1f} per CPU s")
        for process in processes.values():
            process.communicate()
    ratios = {
        engine: [
            rate.per_cpu_second / baseline.per_cpu_second
            for rate, baseline in zip(rates[engine], rates[f"{engine}, baseline"], strict=True)
        ]
        for engine in options.engines
        if options.baseline is not None
    }
    for engine, values in ratios.items():
        print(f"{engine} / baseline, per CPU second: {statistics.median(values):.2f}")
    settings = {"model": Path(options.model).name, "threads": options.threads}
    settings |= {"groups": options.groups, "group_size": GROUP_SIZE}
    content = {
        "settings": settings,
        "rates": {name: [asdict(rate) for rate in values] for name, values in rates.items()},
        "ratios_per_cpu_second": ratios,
    }
    MODEL_RESULTS.write_text(json.dumps(content, indent=2) + "\n")


def compare() -> list[Result]:
    """Measure all engines on all workloads in turn and return the results."""
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(Path(folder))
        processes = {engine: start_process(engine, folder, 1, 0) for engine in ENGINES}
        for process in processes.values():
            request_line(process)
        samples: dict[tuple[str, str], list[float]] = {}
        rounds = range(NUM_ROUNDS + 1)
        for number, workload, engine in itertools.product(rounds, WORKLOADS, ENGINES):
            rate = float(request_line(processes[engine], workload).split()[0])
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


def compare_on_tiny_model() -> None:
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


def main() -> None:
    """Measure what the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model (default: a tiny model)")
    parser.add_argument("--baseline", type=Path, help="another checkout to compare with")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--threads", type=int, default=1, help="threads per engine (default: 1)")
    parser.add_argument("--groups", type=int, default=8, help="groups per round (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per engine (default: 3)")
    parser.add_argument("--measure", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure, options.model, options.threads, options.groups)
    elif options.model is not None:
        compare_on_model(options)
    else:
        compare_on_tiny_model()


if __name__ == "__main__":
    main()
