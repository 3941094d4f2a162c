"""Rewards and messages of hostile environments end their own episodes, or a start by one error."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import RolloutConfig
from ludus.proto.rewards import MAX_REWARD
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.models.chat import ChatTokenizer
from tests.agents.random_policy import make_tiny_chat
from tests.attack.attacked import (
    AttackedProcess,
    make_cases,
    make_folder,
    run_command,
    serve_env,
    watch,
)
from tests.attack.test_commands import check_clean
from tests.rollout.scripted_policy import make_player

pytestmark = pytest.mark.slow

LIMITS = RolloutConfig(max_completion_tokens=8, max_tokens=512, max_turns=3)
END = "; terminated = True"
VOID_REWARDS: dict[str, list[str]] = {
    "too large to average": ["reward = -1e308"],
    "infinite": ["reward = float('inf')"],
    "no number": ["reward = float('nan')"],
    "one more than the limit": ["reward = 1e12 + 1"],
    "sum that overflows": ["reward = 9e11", "reward = 9e11"],
    "negative sum": ["reward = -9e11", "reward = -2e11"],
    "integer of 400 digits": ["reward = 10 ** 400"],
    "integer of a million digits": ["reward = 1 << 3_000_000"],
    "NumPy scalar": ["import numpy; reward = numpy.float32(3e38)"],
    "NumPy scalar without a number": ["import numpy; reward = numpy.float64('nan')"],
    "long double": ["import numpy; reward = numpy.longdouble('1e4000')"],
    "array": ["import numpy; reward = numpy.ones(2)"],
    "list": ["reward = [1.0]"],
    "complex": ["reward = 1j"],
    "text": ["reward = 'one'"],
    "text of infinity": ["reward = '1e999'"],
    "decimal": ["import decimal; reward = decimal.Decimal('1e400')"],
    "fraction": ["import fractions; reward = fractions.Fraction(10 ** 400, 3)"],
    "object that lies": ["reward = type('R', (float,), {'__float__': lambda _: 1e300})(1)"],
    "object that fails": ["reward = type('R', (), {'__float__': lambda _: 1 / 0})()"],
    "object that exits": ["reward = type('R', (), {'__float__': lambda _: exit()})()"],
}
"""Codes of the steps of an episode that must be void."""
SCORED_REWARDS: dict[str, list[str]] = {
    "limit": ["reward = 1e12" + END],
    "smallest number": ["reward = 5e-324" + END],
    "negative zero": ["reward = -0.0" + END],
    "truth": ["reward = True" + END],
    "NumPy integer": ["import numpy; reward = numpy.int64(3)" + END],
    "sum that cancels": ["reward = 9e11", "reward = -9e11" + END],
}
WRONG_MESSAGES: dict[str, str] = {
    "no messages": "[]",
    "nothing": "None or 0",
    "text": "'Total?'",
    "list of texts": "['Total?', 'Total?']",
    "pairs": "[('user', 'Total?')]",
    "no role": "[{'content': 'Total?'}]",
    "unknown role": "[{'role': 'developer', 'content': 'Total?'}]",
    "role in capitals": "[{'role': 'USER', 'content': 'Total?'}]",
    "role with white space": "[{'role': 'user ', 'content': 'Total?'}]",
    "role that is no text": "[{'role': 1, 'content': 'Total?'}]",
    "list as a role": "[{'role': ['user'], 'content': 'Total?'}]",
    "no content": "[{'role': 'user'}]",
    "number as content": "[{'role': 'user', 'content': 1e999}]",
    "null as content": "[{'role': 'user', 'content': None}]",
    "bytes as content": "[{'role': 'user', 'content': b'Total?'}]",
    "object as content": "[{'role': 'user', 'content': {'text': 'Total?'}}]",
    "parts": "[{'role': 'user', 'content': [{'type': 'text', 'text': 'Total?'}]}]",
    "nested lists": "[[{'role': 'user', 'content': 'Total?'}]]",
    "message instead of a list": "{'role': 'user', 'content': 'Total?'}",
    "keys that are no texts": "[{1: 'user', 2: 'Total?'}]",
    "10,000 messages": "[{'role': 'user', 'content': 'Total?'}] * 10_000",
    "endless messages": "__import__('itertools').repeat({'role': 'user', 'content': 'a'}, 10**6)",
    "message that contains itself": "(lambda m: (m.update(content=m), [m])[1])({'role': 'user'})",
    "deep content": "eval('[' * 150 + ']' * 150)",
}
"""Python code of messages that end their episode."""
HARMLESS_MESSAGES: dict[str, str] = {
    "surrogates": r"[{'role': 'user', 'content': '\ud83d\ud800'}]",
    "null": r"[{'role': 'user', 'content': 'a\0b'}]",
    "no text in a message": "[{'role': 'user', 'content': ''}]",
    "more keys": "[{'role': 'user', 'content': 'a', 'name': 'evil', 'tool_calls': 3}]",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProcess]:
    with serve_env(tmp_path_factory.mktemp("environment") / "empty") as attacked:
        yield attacked


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return make_tiny_chat()


async def play_beside_another(
    environment: AttackedProcess, chat: ChatTokenizer, codes: list[str]
) -> Any:
    """Play an episode with these codes while another player plays; return the rollout."""
    async with await AsyncEnvClient.connect(environment.grpc) as client:
        hostile, _ = make_player(client, chat, iter([*codes, *[""] * 4]), limits=LIMITS)
        harmless, _ = make_player(client, chat, repeat("terminated = True"), limits=LIMITS)

        async def play() -> None:
            rollout = await harmless.play_episode(1)
            assert (rollout.status, rollout.reward) == (RolloutStatus.TERMINATED, 1.0)

        async with watch(play):
            return await hostile.play_episode(2)


@pytest.mark.parametrize("codes", make_cases(VOID_REWARDS))
async def test_reward_beyond_the_limit_voids_its_episode_only(
    environment: AttackedProcess, chat: ChatTokenizer, codes: list[str]
) -> None:
    rollout = await play_beside_another(environment, chat, codes)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reward is None
    assert len(rollout.failure) < 20_000
    assert environment.is_alive


@pytest.mark.parametrize("codes", make_cases(SCORED_REWARDS, 0))
async def test_reward_within_the_limit_is_scored(
    environment: AttackedProcess, chat: ChatTokenizer, codes: list[str]
) -> None:
    rollout = await play_beside_another(environment, chat, codes)
    assert rollout.status is RolloutStatus.TERMINATED, rollout.failure
    assert math.isfinite(rollout.reward)
    assert abs(rollout.reward) <= MAX_REWARD


@pytest.mark.parametrize("messages", make_cases(WRONG_MESSAGES))
async def test_wrong_messages_end_their_episode_only(
    environment: AttackedProcess, chat: ChatTokenizer, messages: str
) -> None:
    rollout = await play_beside_another(environment, chat, [f"messages = {messages}"])
    assert rollout.status in (RolloutStatus.FAILED, RolloutStatus.TRUNCATED)
    assert len(rollout.failure) < 20_000


@pytest.mark.parametrize("messages", make_cases(HARMLESS_MESSAGES, 0))
async def test_unusual_messages_do_not_end_their_episode(
    environment: AttackedProcess, chat: ChatTokenizer, messages: str
) -> None:
    codes = [f"messages = {messages}", "terminated = True"]
    rollout = await play_beside_another(environment, chat, codes)
    assert rollout.status is RolloutStatus.TERMINATED, rollout.failure


# -- runs ----------------------------------------------------------------------------------------

SMALL_RUN: dict[str, Any] = {
    "model": {"kind": "tiny", "width": 32, "num_heads": 2, "intermediate": 64, "max_tokens": 512}
    | {"warm_start_games": 64},
    "rollout": {"group_size": 4, "num_groups_in_flight": 8, "max_turns": 2}
    | {"max_completion_tokens": 4, "max_tokens": 512},
    "training": {"num_steps": 3, "groups_per_step": 4},
    "eval": {"num_games": 40, "num_games_during": 20, "every_steps": 2},
}


def write_run(folder: Path, package: str, options: dict[str, Any]) -> None:
    """Write the configuration of a run."""
    configuration = {
        "name": "hostile",
        "environment": {"package": f"hostile_env:{package}", "options": options},
        **SMALL_RUN,
    }
    (folder / "run.json").write_text(json.dumps(configuration))


@pytest.mark.parametrize(
    "messages",
    make_cases({name: WRONG_MESSAGES[name] for name in ("no messages", "text", "pairs")}, 0),
)
def test_dry_run_names_the_environment_of_wrong_messages(tmp_path: Path, messages: str) -> None:
    folder = make_folder(tmp_path / "empty")
    write_run(folder, "HostileEnv", {"code": f"messages = {messages}"})
    outcome = run_command(folder, "train", "run.json", "--dry-run")
    assert outcome.returncode == 2
    check_clean(outcome.stderr)
    assert re.search(r"text_renderer of environment .* must return a list", outcome.stderr)
