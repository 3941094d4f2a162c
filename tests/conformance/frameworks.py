"""Episodes of agents from published frameworks, each in a separate virtual environment.

    examples/agents/<name>_agent.py --HTTP--> endpoint --> ConversationTree --> TransformersEngine
            |  in a service or a program            |                                |
            +---- tools over MCP --> environment    +--> Rollout.sequences ==========+  equal tokens

The conformance tests play a few episodes, and bench/agents.py plays a thousand.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel
from upstream_environment import build_virtual_environment

from examples.agents.boxes import Boxes
from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import AgentConfig, RolloutConfig, TinyModel
from ludus.trainer.core.interfaces import GenerateFunction
from ludus.trainer.core.types import Rollout, RolloutStatus, Sampling
from ludus.trainer.learner.warm_start import (
    Conversation,
    list_conversation_texts,
    tokenize_conversation,
    warm_start,
)
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_model, make_tokenizer
from ludus.trainer.rollout.adapters.environment_adapter import ServerRenderer
from ludus.trainer.rollout.adapters.tool_adapter import ToolAdapter, Toolbox
from ludus.trainer.rollout.agents.random_responses import play_with_random_responses
from ludus.trainer.rollout.agents.runner import AgentHost, AgentRunner
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine
from tests.agents.exactness import RecordingEngine, compute_logprob_error
from tests.agents.wild_agent import assert_trained_tokens_are_exact
from tests.rollout.scripted_policy import ScriptedPlayer

AGENTS_FOLDER = Path(__file__).parents[2] / "examples" / "agents"
FRAMEWORKS = ("langgraph", "smolagents")
LIMITS = RolloutConfig(max_completion_tokens=40, max_tokens=1024, max_turns=6)
"""Limits of an episode. `max_turns` is one more than either agent needs."""
_NUM_GAMES = 128
"""Number of games for the warm start of the model."""
_MODEL_CONFIG = TinyModel(
    max_tokens=1024,
    warm_start_layers="all",
    warm_start_learning_rate=3e-3,
    warm_start_epochs=3,
)
_VOID_STATUSES = (RolloutStatus.FAILED, RolloutStatus.LOST)


@dataclass(slots=True)
class EpisodeCounts:
    """Counts over the episodes of one framework's agent."""

    num_episodes: int = 0
    num_void: int = 0
    num_won: int = 0
    num_answers: int = 0
    num_tool_calls: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    """Number of sampled tokens that are trained on."""
    most_at_once: int = 0
    """Maximum number of concurrent requests to the engine."""
    largest_logprob_error: float = 0.0
    """Largest log-prob error of a sampled token, in nats.

    The reference is a forward pass over the complete sequence.
    """
    failures: list[str] = field(default_factory=list)


def find_python(framework: str) -> Path:
    """Return the interpreter of the framework's virtual environment.

    Raises:
        UpstreamEnvironmentError: the virtual environment cannot be created.
    """
    pins = (AGENTS_FOLDER / f"{framework}.txt").read_text().split()
    return build_virtual_environment(f"upstream-{pins[0].replace('==', '-')}", pins)


def make_command(framework: str) -> list[str]:
    """Return the command that plays one episode."""
    return [str(find_python(framework)), str(AGENTS_FOLDER / f"{framework}_agent.py")]


@contextmanager
def service(framework: str, folder: Path) -> Iterator[str]:
    """Start a service that plays episodes and logs to `folder`; yield its address."""
    command = [
        find_python(framework),
        AGENTS_FOLDER / "service.py",
        f"{framework}_agent",
        "--port",
        "0",
    ]
    with (folder / "service.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, (folder / "service.log").read_text()[-3000:]
            yield address
        finally:
            process.kill()
            process.communicate()


@asynccontextmanager
async def serve_boxes() -> AsyncIterator[tuple[AsyncEnvClient, Toolbox]]:
    """Serve the boxes environment; yield a client and the toolbox."""
    async with (
        EnvServer(Boxes, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        yield client, Toolbox(client, "boxes")


async def measure(
    agent: dict[str, Any],
    num_episodes: int,
    seed: int = 0,
    teacher: dict[str, Any] | None = None,
) -> EpisodeCounts:
    """Play episodes of an agent with a model that was warm-started on its prompts.

    Args:
        agent: value of a run's setting environment.agent.
        teacher: agent that plays the episodes of the warm start. Default: the agent itself.

    Raises:
        AssertionError: the sampled tokens differ from the tokens that are trained on.
    """
    config, teacher_config = (
        TypeAdapter[AgentConfig](AgentConfig).validate_python(fields)
        for fields in (agent, teacher or agent)
    )
    async with AsyncExitStack() as stack:
        client, toolbox = await stack.enter_async_context(serve_boxes())
        conversations = await _play_games(teacher_config, client, toolbox, seed)
        model, chat = await asyncio.to_thread(_train_on_games, conversations, seed)
        generator = stack.enter_context(
            closing(AsyncEngine(TransformersEngine(model, end_token_ids=chat.end_token_ids)))
        )
        request_counter = _RequestCounter(generator)
        runner = AgentRunner(
            agent=await AgentHost.start(config, stack),
            environment="boxes",
            client=client,
            generate=request_counter,
            chat=chat,
            renderer=ServerRenderer("game"),
            limits=LIMITS,
            toolbox=toolbox,
        )
        counts = EpisodeCounts()
        slots = asyncio.Semaphore(config.max_concurrent)

        async def play(index: int) -> None:
            async with slots:
                recorder = RecordingEngine(request_counter)
                player = ScriptedPlayer(replace(runner, generate=recorder), run_seed=seed)
                rollout = await player.play_episode(index, LIMITS.group_timeout_s)
                await _check_rollout(counts, rollout, recorder, model)

        await asyncio.gather(*(play(index) for index in range(num_episodes)))
        counts.most_at_once = request_counter.max_requests
        return counts


async def _check_rollout(
    counts: EpisodeCounts, rollout: Rollout, recorder: RecordingEngine, model: PreTrainedModel
) -> None:
    """Add a rollout to the counts; fail if the trained tokens are not the sampled tokens."""
    counts.num_episodes += 1
    if rollout.status in _VOID_STATUSES:
        counts.num_void += 1
        counts.failures.append(str(rollout.failure))
        return
    assert_trained_tokens_are_exact(rollout.sequences, recorder.samples)
    counts.num_won += bool(rollout.success)
    counts.num_answers += len(recorder.samples)
    counts.num_tool_calls += rollout.num_tool_calls
    counts.num_sequences += len(rollout.sequences)
    counts.num_tokens += sum(int(sequence.loss_mask.sum()) for sequence in rollout.sequences)
    error = await asyncio.to_thread(compute_logprob_error, model, rollout.sequences)
    counts.largest_logprob_error = max(counts.largest_logprob_error, error)


async def _play_games(
    config: AgentConfig, client: AsyncEnvClient, toolbox: Toolbox, seed: int
) -> list[Conversation]:
    """Play games with random responses; return their conversations."""

    async def play(game: int) -> list[Conversation]:
        session, first_result = await client.open(seed=seed + 10_000 + game)
        try:
            adapter = ToolAdapter(session, first_result, toolbox, 0.0)
            rng = random.Random(f"framework's game {seed} {game}")
            return await play_with_random_responses(agent, adapter, game, rng, LIMITS.max_turns)
        finally:
            await session.close()

    async with AsyncExitStack() as stack:
        agent = await AgentHost.start(config, stack)
        game_conversations = await asyncio.gather(*(play(game) for game in range(_NUM_GAMES)))
    return [game for games in game_conversations for game in games]


def _train_on_games(games: list[Conversation], seed: int) -> tuple[PreTrainedModel, ChatTokenizer]:
    """Return a tiny model that was warm-started on the games, and its chat tokenizer."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(list_conversation_texts(games), _MODEL_CONFIG.vocab_size)
    chat = ChatTokenizer(tokenizer)
    model = make_model(_MODEL_CONFIG, tokenizer, seed)
    warm_start(model, [tokenize_conversation(chat, game) for game in games], _MODEL_CONFIG, seed)
    return model, chat


class _RequestCounter:
    """An engine that counts its concurrent requests."""

    def __init__(self, generate: GenerateFunction) -> None:
        self._generate = generate
        self._num_requests = 0
        self.max_requests = 0

    async def __call__(self, prompt_ids: list[int], sampling: Sampling, seed: int) -> Any:
        self._num_requests += 1
        self.max_requests = max(self.max_requests, self._num_requests)
        try:
            return await self._generate(prompt_ids, sampling, seed)
        finally:
            self._num_requests -= 1
