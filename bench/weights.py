"""Measure the speed of weight stores and the size of deltas; print one line of JSON.

    .venv/bin/python bench/weights.py                 all stores; S3 with SeaweedFS
    .venv/bin/python bench/weights.py --stores folder

For each store: the seconds to publish and to fetch a full version of a 50 MB model, including
checksums and verification, and the rate of both together relative to a copy of the same bytes in
memory. For a delta between two versions, after a real AdamW step: its size relative to a full
version, the seconds to make and apply it, and the size of the alternative format.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from transformers import Qwen2Config, Qwen2ForCausalLM

from ludus.proto.config import FolderWeightStore, RayWeightStore, S3WeightStore, WeightStoreConfig
from ludus.trainer.actors.weight_store import make_store
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.weights.payload import cast_floats, make_manifest, view_bytes
from ludus.trainer.weights.store import VersionStore

sys.path.insert(0, str(Path(__file__).parents[1] / "dev"))

State = dict[str, torch.Tensor]
STORES = ("ray", "folder", "s3")
CANARY_PROMPT = ScoringRequest([1], [2])
NUM_STEPS = 3


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stores", nargs="*", choices=STORES, default=STORES)
    parser.add_argument("--samples", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _, state = make_two_versions("float32", 1e-3)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    copies = [time_call(lambda: {n: t.clone() for n, t in state.items()}) for _ in range(9)]
    copy_s = statistics.median(copies)
    stores = {
        name: store_result(name, state, arguments.samples, copy_s) for name in arguments.stores
    }
    result = {
        "num_bytes": num_bytes,
        "copy_s": copies,
        "copy_bytes_per_s": num_bytes / copy_s,
        "stores": stores,
        "deltas": {
            f"{dtype}_lr_{rate:g}": delta_result(dtype, rate, arguments.samples)
            for dtype, rate in (("bfloat16", 1e-6), ("float32", 1e-3))
        },
    }
    sys.stdout.write(json.dumps(result) + "\n")


def store_result(name: str, state: State, num_samples: int, copy_s: float) -> dict[str, Any]:
    """Return the seconds and the rate of full versions through one store."""
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    samples: list[dict[str, float]] = []
    with store_settings(name) as config:
        learner, worker = make_store(config), make_store(config)
        for version in range(num_samples + 1):
            publish_s, fetch_s = transfer(learner, worker, version, state)
            samples.append({"publish_s": publish_s, "fetch_s": fetch_s})
    del samples[0]  # the first opens files and connections
    seconds = statistics.median(sample["publish_s"] + sample["fetch_s"] for sample in samples)
    return {
        "samples": samples,
        "bytes_per_s": num_bytes / seconds,
        "rate_over_copy": copy_s / seconds,
    }


def delta_result(dtype: str, learning_rate: float, num_samples: int) -> dict[str, Any]:
    """Return the size of a delta relative to a full version, and its seconds."""
    first, second = make_two_versions(dtype, learning_rate)
    with tempfile.TemporaryDirectory() as folder:
        config = FolderWeightStore(path=folder, full_every=1000)
        samples = []
        for _ in range(num_samples):
            learner, worker = make_store(config), make_store(config)
            transfer(learner, worker, 1, first)
            publish_s, fetch_s = transfer(learner, worker, 2, second)
            samples.append({"publish_s": publish_s, "fetch_s": fetch_s})
        full, delta = (path.stat().st_size for path in sorted(Path(folder).iterdir()))
    return {
        "full_bytes": full,
        "delta_bytes": delta,
        "delta_over_full": delta / full,
        "overwrite_over_full": sum(overwrite_bytes(first[n], second[n]) for n in first) / full,
        "samples": samples,
    }


def overwrite_bytes(old: torch.Tensor, new: torch.Tensor) -> int:
    """Return the size of the alternative delta format: positions and values of changed elements."""
    integers = {2: np.uint16, 4: np.uint32}[new.itemsize]
    old_values, new_values = (view_bytes(tensor).view(integers) for tensor in (old, new))
    [changed] = np.nonzero(old_values != new_values)
    gaps = np.diff(changed.astype(np.uint32), prepend=np.uint32(0))
    compress = zstandard.ZstdCompressor(level=1).compress
    by_rank = np.ascontiguousarray(gaps.view(np.uint8).reshape(-1, 4).T)
    return len(compress(by_rank.data)) + len(compress(new_values[changed].data))


def transfer(
    learner: VersionStore, worker: VersionStore, version: int, state: State
) -> tuple[float, float]:
    """Publish and fetch a version and return the seconds of each, including checksums."""
    published: list[Any] = []

    def publish() -> None:
        published.append(
            learner.publish(make_manifest(version, state, [CANARY_PROMPT], [[0.0]]), state)
        )

    return time_call(publish), time_call(lambda: worker.fetch(published[0]))


def make_two_versions(dtype: str, learning_rate: float) -> tuple[State, State]:
    """Return the weights before and after an AdamW step, as published; about 50 MB each."""
    torch.manual_seed(0)
    width = 512 if dtype == "float32" else 768
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=4096,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    previous: State = {}
    for _ in range(NUM_STEPS):
        previous = snapshot(model, dtype)
        ids = torch.randint(0, 4096, (4, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return previous, snapshot(model, dtype)


def snapshot(model: Qwen2ForCausalLM, dtype: str) -> State:
    """Return a copy of the weights, as published."""
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    return cast_floats(state, dtype)


@contextmanager
def store_settings(name: str) -> Iterator[WeightStoreConfig]:
    """Start a store and yield its settings."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name == "folder":
            yield FolderWeightStore(path=str(folder))
        elif name == "ray":
            import ray

            ray.init(num_cpus=1, object_store_memory=500_000_000, include_dashboard=False)
            stack.callback(ray.shutdown)
            yield RayWeightStore()
        else:
            from upstream_s3_server import running_s3_server

            server = stack.enter_context(running_s3_server(folder))
            os.environ.update(server.credentials)
            yield S3WeightStore(bucket=server.bucket, endpoint=server.endpoint)


def time_call(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
