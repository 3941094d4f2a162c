"""A process that uses vLLM like a rollout worker and prints a report on stdout."""

from __future__ import annotations

import json
import os
import sys

from ludus.trainer.rollout.engines.vllm_process import MULTIPROCESSING_VARIABLE, prepare_process

connections: list[str] = []


def record_connection(event: str, args: tuple[object, ...]) -> None:
    """Record every connection and name look-up."""
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        connections.append(f"{event} {args[1:]}")


def main(model_path: str) -> None:
    """Print one JSON object."""
    prepare_process(num_threads=1)
    sys.addaudithook(record_connection)
    # vLLM and torch read environment variables during their import.
    import torch

    from ludus.proto.config import VllmGenerator
    from ludus.proto.errors import ConfigError
    from ludus.trainer.rollout.engines.vllm_engine import VllmEngine
    from tests.rollout.engine_pair import END_TOKEN_ID, complete, make_requests

    def open_engine(**config: object) -> VllmEngine:
        return VllmEngine(
            model_path,
            VllmGenerator.model_validate(config),
            end_token_id=END_TOKEN_ID,
            max_tokens=128,
            dtype="float32",
        )

    def sample_completions(seed: int) -> list[list[int]]:
        engine = open_engine()
        outputs = complete(engine, make_requests(20, first_seed=seed))
        engine.close()
        return [outputs[request_id].token_ids for request_id in sorted(outputs)]

    def get_error_name(**config: object) -> str:
        try:
            open_engine(**config)
        except ConfigError as error:
            return type(error).__name__
        return "none"

    report = {"answers": [sample_completions(seed) for seed in (500, 500, 600)]}
    torch.set_num_threads(2)
    error_names = [get_error_name(tensor_parallel_size=2)]
    del os.environ[MULTIPROCESSING_VARIABLE]
    error_names.append(get_error_name())
    report |= {
        "connections": connections,
        "has_preload": "LD_PRELOAD" in os.environ,
        "num_threads_after": torch.get_num_threads(),
        "refused": error_names,
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
