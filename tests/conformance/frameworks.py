"""Agents of published frameworks in separate virtual environments, and their episodes.

    examples/agents/<name>_agent.py --HTTP--> endpoint --> ConversationTree --> TransformersEngine
            |  in a service, or a program           |                                |
            +---- tools over MCP --> environment    +--> Rollout.sequences ==========+  the same

Used by the conformance tests with few episodes, by bench/agents.py with a thousand.
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
from tests.agents.wild_agent import check_exact
from tests.rollout.scripted_policy import ScriptedPlayer

AGENTS = Path(__file__).parents[2] / "examples" / "agents"
FRAMEWORKS = ("langgraph", "smolagents")
LIMITS = RolloutConfig(max_completion_tokens=40, max_tokens=1024, max_turns=6)
"""One turn more than either agent needs."""
_NUM_GAMES = 128
"""Number of games in the model's warm start."""
_MODEL = TinyModel(
    max_tokens=1024,
    warm_start_layers="all",
    warm_start_learning_rate=3e-3,
    warm_start_epochs=3,
)
_VOID = (RolloutStatus.FAILED, RolloutStatus.LOST)


@dataclass(slots=True)
class Measured:
    """Counts over the episodes of one framework's agent."""

    num_episodes: int = 0
    num_void: int = 0
    num_won: int = 0
    num_answers: int = 0
    num_tool_calls: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    """Sampled tokens that are trained on."""
    most_at_once: int = 0
    """Episodes that had a request with the engine at the same time."""
    largest_logprob_error: float = 0.0
    """Log-prob difference of a kept token to a forward pass over the complete sequence, in nats."""
    failures: list[str] = field(default_factory=list)


def find_python(framework: str) -> Path:
    """Return the interpreter of the framework's virtual environment.

    Raises:
        UpstreamEnvironmentError: the virtual environment cannot be created.
    """
    pins = (AGENTS / f"{framework}.txt").read_text().split()
    return build_virtual_environment(f"upstream-{pins[0].replace('==', '-')}", pins)


def make_program(framework: str) -> list[str]:
    """Return the command that plays one episode."""
    return [str(find_python(framework)), str(AGENTS / f"{framework}_agent.py")]


@contextmanager
def service(framework: str, folder: Path) -> Iterator[str]:
    """Yield the address of a service that plays episodes; its stderr goes to a log in `folder`."""
    command = [find_python(framework), AGENTS / "service.py", f"{framework}_agent", "--port", "0"]
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
    """Serve the environment; yield a client and the tools."""
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
) -> Measured:
    """Play episodes of an agent with a model that was warm-started on its prompts.

    Args:
        agent: value of environment.agent of a run.
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
            closing(AsyncEngine(TransformersEngine(model, end_token_id=chat.end_token_id)))
        )
        request_counter = _RequestCounter(generator)
        runner = AgentRunner(
            agent=await AgentHost.start(config, stack),
            environment="boxes",
            client=client,
            generate=request_counter,
            chat=chat,
            renderer=ServerRenderer(),
            limits=LIMITS,
            toolbox=toolbox,
        )
        measured = Measured()
        slots = asyncio.Semaphore(config.max_concurrent)

        async def play(number: int) -> None:
            async with slots:
                recorded = RecordingEngine(request_counter)
                player = ScriptedPlayer(replace(runner, generate=recorded), run_seed=seed)
                rollout = await player.play_episode(number, LIMITS.group_timeout_s)
                await _check_rollout(measured, rollout, recorded, model)

        await asyncio.gather(*(play(number) for number in range(num_episodes)))
        measured.most_at_once = request_counter.max_requests
        return measured


async def _check_rollout(
    measured: Measured, rollout: Rollout, recorded: RecordingEngine, model: PreTrainedModel
) -> None:
    """Check that exactly the sampled tokens are trained on, and count them."""
    measured.num_episodes += 1
    if rollout.status in _VOID:
        measured.num_void += 1
        measured.failures.append(str(rollout.failure))
        return
    check_exact(rollout.sequences, recorded.samples)
    measured.num_won += bool(rollout.success)
    measured.num_answers += len(recorded.samples)
    measured.num_tool_calls += rollout.num_tool_calls
    measured.num_sequences += len(rollout.sequences)
    measured.num_tokens += sum(int(sequence.loss_mask.sum()) for sequence in rollout.sequences)
    error = await asyncio.to_thread(compute_logprob_error, model, rollout.sequences)
    measured.largest_logprob_error = max(measured.largest_logprob_error, error)


async def _play_games(
    config: AgentConfig, client: AsyncEnvClient, toolbox: Toolbox, seed: int
) -> list[Conversation]:
    """Return the messages between the agent and a random policy."""

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
    """Return a tiny model that has learned the form of this agent's responses."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(list_conversation_texts(games), _MODEL.vocab_size)
    chat = ChatTokenizer(tokenizer)
    model = make_model(_MODEL, tokenizer, seed)
    warm_start(model, [tokenize_conversation(chat, game) for game in games], _MODEL, seed)
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
