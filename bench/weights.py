"""How fast weights travel, and how much of them must. Prints one line of JSON.

    .venv/bin/python bench/weights.py                 all stores, the S3 one over SeaweedFS
    .venv/bin/python bench/weights.py --stores folder

For each store: seconds to publish and to fetch a complete version of a model of some 50 MB,
checksums and verification included, and the rate of both together against a plain copy of the
same bytes in memory. For the difference between two versions: its bytes against a complete
version's, after a real AdamW step, what it takes to make and to apply it, and the bytes of the
other way to write it.
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
from ludus.trainer.weights import VersionStore, cast_floats, make_manifest
from ludus.trainer.weights.manifest import raw_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "dev"))

State = dict[str, torch.Tensor]
STORES = ("ray", "folder", "s3")
CANARY_PROMPT = ScoringRequest([1], [2])
NUM_STEPS = 3


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stores", nargs="*", choices=STORES, default=STORES)
    parser.add_argument("--samples", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _, state = two_versions("float32", 1e-3)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    copies = [timed(lambda: {n: t.clone() for n, t in state.items()}) for _ in range(9)]
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
    """Seconds and rates of complete versions through one store."""
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    samples: list[dict[str, float]] = []
    with store_settings(name) as config:
        learner, worker = make_store(config), make_store(config)
        for version in range(num_samples + 1):
            publish_s, fetch_s = travel(learner, worker, version, state)
            samples.append({"publish_s": publish_s, "fetch_s": fetch_s})
    del samples[0]  # the first opens files and connections
    seconds = statistics.median(sample["publish_s"] + sample["fetch_s"] for sample in samples)
    return {
        "samples": samples,
        "bytes_per_s": num_bytes / seconds,
        "rate_over_copy": copy_s / seconds,
    }


def delta_result(dtype: str, learning_rate: float, num_samples: int) -> dict[str, Any]:
    """Bytes of a difference against those of a complete version, and its seconds."""
    first, second = two_versions(dtype, learning_rate)
    with tempfile.TemporaryDirectory() as folder:
        config = FolderWeightStore(path=folder, full_every=1000)
        samples = []
        for _ in range(num_samples):
            learner, worker = make_store(config), make_store(config)
            travel(learner, worker, 1, first)
            publish_s, fetch_s = travel(learner, worker, 2, second)
            samples.append({"publish_s": publish_s, "fetch_s": fetch_s})
        complete, delta = (path.stat().st_size for path in sorted(Path(folder).iterdir()))
    return {
        "full_bytes": complete,
        "delta_bytes": delta,
        "delta_over_full": delta / complete,
        "overwrite_over_full": sum(overwrite_bytes(first[n], second[n]) for n in first) / complete,
        "samples": samples,
    }


def overwrite_bytes(old: torch.Tensor, new: torch.Tensor) -> int:
    """Bytes of the other way to write a difference: which elements changed, and what they are."""
    integers = {2: np.uint16, 4: np.uint32}[new.itemsize]
    before, after = (raw_bytes(tensor).view(integers) for tensor in (old, new))
    [changed] = np.nonzero(before != after)
    gaps = np.diff(changed.astype(np.uint32), prepend=np.uint32(0))
    compress = zstandard.ZstdCompressor(level=1).compress
    by_rank = np.ascontiguousarray(gaps.view(np.uint8).reshape(-1, 4).T)
    return len(compress(by_rank.data)) + len(compress(after[changed].data))


def travel(
    learner: VersionStore, worker: VersionStore, version: int, state: State
) -> tuple[float, float]:
    """Seconds to publish and to fetch, each with its checksums."""
    published: list[Any] = []

    def publish() -> None:
        published.append(
            learner.publish(make_manifest(version, state, [CANARY_PROMPT], [[0.0]]), state)
        )

    return timed(publish), timed(lambda: worker.fetch(published[0]))


def two_versions(dtype: str, learning_rate: float) -> tuple[State, State]:
    """The weights before and after an AdamW step, as they travel; some 50 MB each."""
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
    before: State = {}
    for _ in range(NUM_STEPS):
        before = snapshot(model, dtype)
        ids = torch.randint(0, 4096, (4, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return before, snapshot(model, dtype)


def snapshot(model: Qwen2ForCausalLM, dtype: str) -> State:
    """The weights as they travel, apart from what the optimizer writes to."""
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    return cast_floats(state, dtype)


@contextmanager
def store_settings(name: str) -> Iterator[WeightStoreConfig]:
    """Settings of a store that is up."""
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


def timed(call: Callable[[], object]) -> float:
    """Seconds that the call took."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
