"""A process that uses vLLM as a rollout worker does and prints a JSON report to stdout."""

from __future__ import annotations

import json
import os
import sys

from ludus.trainer.rollout.engines.vllm_process import MULTIPROCESSING_VARIABLE, prepare_process

connections: list[str] = []
"""Network calls of this process."""


def record_connection(event: str, args: tuple[object, ...]) -> None:
    """Record the event if it is a connection, a name lookup or a sent datagram."""
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        connections.append(f"{event} {args[1:]}")


def main(model_path: str) -> None:
    """Sample with vLLM and print the report."""
    prepare_process(num_threads=1)
    sys.addaudithook(record_connection)
    # vLLM and torch read environment variables at import, so prepare_process must run first.
    import torch

    from ludus.proto.config import VllmGenerator
    from ludus.proto.errors import ConfigError
    from ludus.trainer.rollout.engines.vllm_engine import VllmEngine
    from tests.rollout.engine_pair import END_TOKEN_ID, complete, make_requests

    def open_engine(**config: object) -> VllmEngine:
        return VllmEngine(
            model_path,
            VllmGenerator.model_validate(config),
            end_token_ids=[END_TOKEN_ID],
            max_tokens=128,
            dtype="float32",
        )

    def sample_completions(seed: int) -> list[list[int]]:
        engine = open_engine()
        outputs = complete(engine, make_requests(20, first_seed=seed))
        engine.close()
        return [outputs[request_id].token_ids for request_id in sorted(outputs)]

    def try_open_engine(**config: object) -> str:
        """Return the type name of the raised ConfigError, or "none"."""
        try:
            open_engine(**config)
        except ConfigError as error:
            return type(error).__name__
        return "none"

    report = {"answers": [sample_completions(seed) for seed in (500, 500, 600)]}
    torch.set_num_threads(2)
    error_names = [try_open_engine(tensor_parallel_size=2)]
    del os.environ[MULTIPROCESSING_VARIABLE]
    error_names.append(try_open_engine())
    report |= {
        "connections": connections,
        "has_preload": "LD_PRELOAD" in os.environ,
        "num_threads_after": torch.get_num_threads(),
        "refused": error_names,
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
