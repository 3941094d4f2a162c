"""An endpoint of agents with a policy that always samples the same text.

    python bench/attacked_endpoint.py --episodes 2

The program prints one JSON object with the fields `base_url_N` and `api_key_N` of each episode, and
serves until it is stopped. `bench/attack.py` and the tests of `make attack` attack it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

from ludus.proto.config import RolloutConfig
from ludus.trainer.core.types import SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint

TEXTS = ["word", "the key is in the red box", "red", '{"name": "look", "arguments": {}}']


async def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=2, help="number of open episodes")
    parser.add_argument("--max-tokens", type=int, default=512, help="rollout.max_tokens")
    parser.add_argument("--max-turns", type=int, default=100_000, help="rollout.max_turns")
    parser.add_argument("--prompts-file", type=Path, help="file for the tokens of each prompt")
    args = parser.parse_args()
    chat = ChatTokenizer(make_tokenizer(TEXTS * 4, 500))
    limits = RolloutConfig(
        max_completion_tokens=16, max_tokens=args.max_tokens, max_turns=args.max_turns
    )
    token_ids = chat.encode_completion("red")

    async def sample(prompt_ids: list[int], *_: object) -> SampledCompletion:
        if args.prompts_file is not None:
            with args.prompts_file.open("a") as file:
                file.write(f"{json.dumps(prompt_ids)}\n")
        return SampledCompletion(list(token_ids), [-1.0] * len(token_ids), 0, True)

    stop_event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop_event.set)
    endpoint = AgentEndpoint()
    await endpoint.start()
    with contextlib.ExitStack() as stack:
        addresses: dict[str, str] = {}
        for index in range(args.episodes):
            tree = ConversationTree(sample, chat, limits, Sampling(1.0, 16), key=index)
            access = stack.enter_context(endpoint.open_episode(tree)).access
            addresses |= {f"base_url_{index}": access.base_url, f"api_key_{index}": access.api_key}
        sys.stdout.write(json.dumps(addresses) + "\n")
        sys.stdout.flush()
        await stop_event.wait()
    await endpoint.stop()


if __name__ == "__main__":
    asyncio.run(main())
