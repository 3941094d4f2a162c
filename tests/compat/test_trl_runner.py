"""TRL's rollout functions with a real engine, environment server and generation port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
import torch

from ludus.env.client import AsyncEnvClient
from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import LanguageModelRun, make_run_config
from ludus.proto.errors import ConfigError, RolloutFunctionError
from ludus.trainer.compat.trl import generate_rollout_completions
from ludus.trainer.compat.trl.rollout.arguments import (
    RolloutTrainer,
    RolloutTrainerState,
    override_sampling,
)
from ludus.trainer.compat.trl.rollout.completion_service import (
    CompletionService,
    GeneratePort,
    RolloutCall,
)
from ludus.trainer.core.types import (
    GroupSpec,
    RolloutGroup,
    RolloutStatus,
    Sampling,
    ScoringRequest,
)
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.group import GroupPlayer, find_registered_runner
from ludus.trainer.rollout.rewards.reward_models import RewardModels
from ludus.trainer.rollout.runner import RunnerComponents, sampling_settings
from openspiel_env import make_environment
from tests.compat import trl_functions
from tests.rollout.engine_pair import TOLERANCE, make_folder, make_transformers_engine

GROUP_SIZE = 4
GROUP_SPECS = [
    GroupSpec(0, "blackjack", (5,) * GROUP_SIZE),
    GroupSpec(1, "blackjack", (6,) * GROUP_SIZE),
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_folder(tmp_path_factory.mktemp("model"), tie_embeddings=False)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[AsyncEnvClient]:
    async with (
        EnvServer(lambda: make_environment(game="blackjack"), ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as environment_client,
    ):
        yield environment_client


def make_config(function: str, environment: Any = (), **rollout: Any) -> Any:
    return make_run_config(
        {
            "environment": {
                "package": "openspiel_env",
                "options": {"game": "blackjack"},
                "rollout": f"trl:tests.compat.trl_functions:{function}",
                "rewards": [{"function": "tests.compat.trl_functions:compute_length_reward"}],
                **dict(environment),
            },
            "rollout": {
                "group_size": GROUP_SIZE,
                "max_completion_tokens": 5,
                "max_tokens": 64,
                "generate_port": 0,
                **rollout,
            },
        },
        [],
    )


@dataclass
class WorkerComponents:
    """Components of a rollout worker for one environment."""

    run: LanguageModelRun
    player: GroupPlayer
    engine: AsyncEngine

    async def play_groups(self) -> list[RolloutGroup]:
        """Play all groups of GROUP_SPECS in one call."""
        sampling = sampling_settings(self.run.rollout)
        return await self.player.play_groups(GROUP_SPECS, sampling, [2, 0])


@pytest.fixture
def start_worker(model_path: str, client: AsyncEnvClient) -> Any:
    @asynccontextmanager
    async def start(
        function: str, environment: Any = (), **rollout: Any
    ) -> AsyncIterator[WorkerComponents]:
        run = make_config(function, environment, **rollout)
        chat = ChatTokenizer(load_tokenizer(model_path))
        engine = AsyncEngine(make_transformers_engine(model_path))
        try:
            async with AsyncExitStack() as stack:
                components = RunnerComponents(run, "blackjack", client, engine, chat, stack)
                yield WorkerComponents(
                    run, await GroupPlayer.start(components, RewardModels()), engine
                )
        finally:
            engine.close()

    trl_functions.CALLS.clear()
    return start


async def play_groups(start_worker: Any, function: str, **rollout: Any) -> list[RolloutGroup]:
    async with start_worker(function, **rollout) as worker:
        return await worker.play_groups()


async def find_failure(start_worker: Any, function: str, **rollout: Any) -> str:
    """Assert that all episodes failed for the same reason; return the reason."""
    groups = await play_groups(start_worker, function, **rollout)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.FAILED}
    assert {rollout.reward for rollout in rollouts} == {None}
    [failure] = {rollout.failure for rollout in rollouts}
    return failure


@asynccontextmanager
async def open_port(model_path: str) -> AsyncIterator[str]:
    """Start a generation port with a real engine; yield its URL."""
    engine = AsyncEngine(make_transformers_engine(model_path))
    chat = ChatTokenizer(load_tokenizer(model_path))
    port = GeneratePort(CompletionService(engine, chat, 64, 0, 0), 0)
    await port.start()
    try:
        yield f"http://127.0.0.1:{port.port}/generate/"
    finally:
        await port.stop()
        engine.close()


@pytest.mark.slow
async def test_all_signatures_play_the_same_groups(start_worker: Any) -> None:
    functions = ("complete_over_http", "complete_over_http_with_images", "complete_by_call")
    groups = [await play_groups(start_worker, function) for function in functions]
    assert groups[0] == groups[1] == groups[2]
    assert [group.index for group in groups[0]] == [0, 1]
    rollouts = [rollout for group in groups[0] for rollout in group.rollouts]
    assert [rollout.seed for rollout in rollouts] == [5] * GROUP_SIZE + [6] * GROUP_SIZE
    assert (
        len({tuple(rollout.sequences[0].token_ids.tolist()) for rollout in rollouts})
        == 2 * GROUP_SIZE
    )
    assert all(rollout.reward == rollout.episode_return for rollout in rollouts)


@pytest.mark.slow
async def test_all_sampled_tokens_are_trained_on_with_the_engines_logprobs(
    start_worker: Any,
) -> None:
    async with start_worker("complete_over_http") as worker:
        for group in await worker.play_groups():
            for rollout in group.rollouts:
                [sequence] = rollout.sequences
                [turn] = sequence.turns
                assert turn.end == len(sequence.token_ids)
                ids = sequence.token_ids.tolist()
                request = ScoringRequest(ids[: turn.start], ids[turn.start :])
                [expected_logprobs] = await worker.engine.score([request])
                logprobs = sequence.logprobs[turn.start :].tolist()
                assert logprobs == pytest.approx(expected_logprobs, abs=TOLERANCE)


@pytest.mark.slow
async def test_environment_tokens_are_not_trained_on(start_worker: Any) -> None:
    groups = await play_groups(start_worker, "sample_two_completions")
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        [sequence] = rollout.sequences
        assert rollout.reward == 3.0
        assert [turn.end - turn.start <= 2 for turn in sequence.turns] == [True, True]
        index = sequence.turns[0].end
        assert (sequence.token_ids[index], sequence.logprobs[index]) == (7, 0.0)
        assert not sequence.loss_mask[index]


@pytest.mark.slow
async def test_rows_have_transcripts(start_worker: Any) -> None:
    groups = await play_groups(start_worker, "sample_two_completions")
    assert [len(group.transcripts) for group in groups] == [2, 0]
    first_turn, second_turn = groups[0].transcripts[0].turns
    assert [message.role for message in first_turn.shown] == ["user"]
    assert [message.role for message in second_turn.shown] == ["environment"]
    assert groups[0].transcripts[0].reward == 3.0


@pytest.mark.slow
async def test_function_receives_prompts_and_sampling_settings(start_worker: Any) -> None:
    await play_groups(start_worker, "complete_over_http")
    prompts, args = trl_functions.CALLS[0]
    assert (len(prompts), args.num_generations, args.max_completion_length) == (2, GROUP_SIZE, 5)
    assert (args.temperature, args.top_p, args.top_k, args.min_p) == (1.0, 1.0, 0, None)
    with pytest.raises(AttributeError, match="args has no 'learning_rate' in this run"):
        _ = args.learning_rate
    trl_functions.CALLS.clear()
    await play_groups(start_worker, "complete_by_call")
    prompts, trainer = trl_functions.CALLS[0]
    assert (len(prompts), trainer.args.num_generations) == (2 * GROUP_SIZE, GROUP_SIZE)
    assert prompts[0] == prompts[GROUP_SIZE - 1] != prompts[GROUP_SIZE]
    assert trainer.state.global_step == 0


@pytest.mark.slow
async def test_environment_overrides_the_completion_limit(start_worker: Any) -> None:
    async with start_worker(
        "complete_over_http", environment={"max_completion_tokens": 2}
    ) as worker:
        for group in await worker.play_groups():
            assert max(rollout.num_tokens_sampled for rollout in group.rollouts) <= 2
    assert trl_functions.CALLS[0][1].max_completion_length == 2


@pytest.mark.slow
async def test_rewards_are_computed_once_for_all_groups_of_a_call(start_worker: Any) -> None:
    await play_groups(start_worker, "complete_by_call")
    [columns] = [call for call in trl_functions.CALLS if isinstance(call, dict)]
    assert len(columns["completions"]) == 2 * GROUP_SIZE
    assert columns["completions"][0][0]["role"] == "assistant"
    assert columns["seed"] == [5] * GROUP_SIZE + [6] * GROUP_SIZE


@pytest.mark.slow
async def test_environments_are_not_reset_while_rewards_read_them(start_worker: Any) -> None:
    rewards = [{"function": "tests.compat.trl_functions:check_numbers"}]
    async with start_worker(
        "play_numbered_episodes", {"rewards": rewards}, max_tokens=400
    ) as worker:
        calls = [*await asyncio.gather(worker.play_groups(), worker.play_groups())]
        num_instances = len(trl_functions.NumberedEpisode.instances)
        calls.append(await worker.play_groups())
    groups = [group for call in calls for group in call]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {(rollout.reward, rollout.failure) for rollout in rollouts} == {(1.0, "")}
    # An episode that starts later uses one of the released instances.
    assert len(trl_functions.NumberedEpisode.instances) == num_instances


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("omit_logprobs", "without ['logprobs']"),
        (
            "raise_error",
            "raised ZeroDivisionError: division failed (in raise_error, trl_functions.py",
        ),
        ("exit_process", "raised SystemExit: 3 (in exit_process, trl_functions.py"),
        ("read_model", "trainer.model is not available"),
        ("invent_logprobs", "is -0.0010, but the engine's log-prob"),
        ("change_tokens", "row 0 (prompt 0, completion 0): the log-prob of completion token"),
        (
            "change_temperature",
            "was sampled with temperature = 0.5, but the run trains with temperature = 1",
        ),
    ],
)
async def test_invalid_rollout_function_fails_all_groups_of_the_call(
    start_worker: Any, function: str, message: str
) -> None:
    assert message in await find_failure(start_worker, function)


@pytest.mark.slow
async def test_slow_rollout_function_fails_all_groups_of_the_call(start_worker: Any) -> None:
    failure = await find_failure(start_worker, "respond_slowly", group_timeout_s=0.2)
    assert "did not return within rollout.group_timeout_s = 0.2 s" in failure


@pytest.mark.slow
async def test_evaluation_plays_each_seed_once(start_worker: Any) -> None:
    async with start_worker("complete_over_http") as worker:
        sampling = replace(sampling_settings(worker.run.rollout), temperature=0.0)
        seeds = [2**31 + number for number in range(5)]
        rollouts = await worker.player.evaluate(seeds, sampling)
        prompts, args = trl_functions.CALLS[0]
    assert [rollout.seed for rollout in rollouts] == seeds
    assert (len(prompts), args.num_generations, args.temperature) == (5, 1, 0.0)
    assert all(isinstance(rollout.episode_return, float) for rollout in rollouts)


@pytest.mark.slow
async def test_port_responds_like_a_trl_server(model_path: str) -> None:
    async with open_port(model_path) as url, httpx.AsyncClient(timeout=60) as http:
        body = {"prompts": ["hard 16", [5, 9, 11]], "n": 3, "max_tokens": 4, "top_k": -1}
        response = (await http.post(url, json=body)).json()
        assert {key: len(value) for key, value in response.items()} == {
            "prompt_ids": 2,
            "completion_ids": 6,
            "logprobs": 6,
        }
        assert response["prompt_ids"][1] == [5, 9, 11]
        for ids, logprobs in zip(response["completion_ids"], response["logprobs"], strict=True):
            assert len(ids) == len(logprobs) <= 4
        greedy_request = {"prompts": ["hard 16"], "n": 2, "max_tokens": 3, "temperature": 0}
        ids = (await http.post(url, json=greedy_request)).json()["completion_ids"]
        assert ids[0] == ids[1]
        response = (await http.post(url, json={"prompts": [[5, 9]], "max_tokens": 10**9})).json()
        assert 0 < len(response["completion_ids"][0]) <= 62


@pytest.mark.slow
async def test_port_refuses_unknown_fields_and_large_requests(model_path: str) -> None:
    async with open_port(model_path) as url, httpx.AsyncClient(timeout=60) as http:
        unknown_response = await http.post(url, json={"prompts": ["a"], "best_of": 3})
        assert unknown_response.status_code == 422
        assert unknown_response.json()["detail"][0]["loc"] == ["body", "best_of"]
        long_response = await http.post(url, json={"prompts": [[1] * 64]})
        assert "rollout.max_tokens = 64, got one of 64" in long_response.json()["detail"]
        large_response = await http.post(url, content=b" " * (MAX_MESSAGE_BYTES + 1))
        assert (large_response.status_code, large_response.json()["detail"]) == (
            413,
            f"expected at most {MAX_MESSAGE_BYTES} bytes",
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompts": ["a", "b"], "n": 8193}, "16384 completions of one request, got 2 prompts"),
        ({"prompts": ["a"], "n": 10**18}, "1 prompts times n = 1000000000000000000; send several"),
        ({"prompts": ["a"] * 16_385}, "got 16385 prompts times n = 1; send several requests"),
        ({"prompts": [[5, 10**6]]}, "below 277, the size of the vocabulary, got 1000000 at"),
        ({"prompts": [[-1]]}, "got -1 at position 0"),
        ({"prompts": ["a"], "temperature": 1e-300}, "temperature must be 0, or a number"),
        ({"prompts": ["a"], "top_p": 1e-300}, "top_p must be a number from"),
        ({"prompts": ["a"], "repetition_penalty": 1e300}, "repetition_penalty must be"),
    ],
)
async def test_request_that_would_stop_the_engine_is_refused(
    model_path: str, body: dict[str, Any], message: str
) -> None:
    async with open_port(model_path) as url, httpx.AsyncClient(timeout=60) as http:
        refused_response = await http.post(url, json=body)
        assert refused_response.status_code == 422 and message in refused_response.json()["detail"]
        assert (await http.post(url, json={"prompts": ["hard 16"]})).status_code == 200


def test_overrides_are_checked() -> None:
    sampling = Sampling(1.0, 8)
    assert override_sampling(sampling, {"temperature": None, "max_new_tokens": 3}).max_tokens == 3
    assert override_sampling(sampling, {"top_k": -1}) == sampling
    for overrides, message in (
        ({"temperature": "hot"}, "generation_overrides: temperature must be 0, or a"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of 1 or more"),
        ({"top_p": 0}, "top_p must be a number from"),
        ({"min_p": float("nan")}, "min_p must be a number from 0 to 1"),
        ({"best_of": 3}, r"contains \['best_of'\]"),
    ):
        with pytest.raises(RolloutFunctionError, match=message):
            override_sampling(sampling, overrides)


def test_prompts_are_checked(model_path: str) -> None:
    chat = ChatTokenizer(load_tokenizer(model_path))
    engine: Any = None
    service = CompletionService(engine, chat, 64, 0, 0)
    with pytest.raises(RolloutFunctionError, match=r"as_chat = False needs a prompt of text"):
        service.encode_prompt([{"role": "user", "content": "a"}], as_chat=False)
    long_text = "a" * 100_000
    prompts: list[Any] = [long_text, [{"role": "user", "content": long_text}]]
    for prompt in prompts:
        with pytest.raises(RolloutFunctionError, match="got one of 100000 characters"):
            service.encode_prompt(prompt)
    args = SimpleNamespace(num_generations=1, max_completion_length=8)
    trainer = RolloutTrainer(
        args,
        chat.tokenizer,
        RolloutTrainerState(0),
        [],
        Sampling(1.0, 8),
        service,
        RolloutCall([0]),
        engine,
    )
    with pytest.raises(RolloutFunctionError, match=r"got the text 'hard 16'; write \[prompt\]"):
        generate_rollout_completions(trainer, "hard 16")


async def test_port_in_use_is_replaced_by_a_free_port(model_path: str) -> None:
    engine: Any = None
    service = CompletionService(engine, ChatTokenizer(load_tokenizer(model_path)), 64, 0, 0)
    first_port = GeneratePort(service, 0)
    second_port = GeneratePort(service, first_port.port)
    assert second_port.port not in (0, first_port.port)


def test_runner_must_be_registered() -> None:
    with pytest.raises(ConfigError, match=r"'no_runner:\.\.\.' names a runner that is not"):
        find_registered_runner("no_runner")


def test_run_without_reward_function_is_refused() -> None:
    run = {"environment": {"rollout": "trl:m:f", "rewards": [{"function": "m:r"}]}}
    assert make_run_config(run, []).environment.plays_in_batches
    with pytest.raises(ConfigError, match="every term of rewards needs a function"):
        make_run_config({"environment": {"rollout": "trl:m:f"}}, [])
    with pytest.raises(ConfigError, match="group_seed = 'independent' gives every episode"):
        make_run_config(run, ["rollout.group_seed=independent"])
    with pytest.raises(ConfigError, match="generate_port = 8000 needs a registered runner"):
        make_run_config({}, ["rollout.generate_port=8000"])


@pytest.mark.parametrize(("host", "status"), [("0.0.0.0:8000", 200), ("evil.example", 403)])
async def test_generate_port_accepts_names_of_this_machine(host: str, status: int) -> None:
    port = GeneratePort(cast(Any, None), 0)
    await port.start()
    try:
        async with httpx.AsyncClient(timeout=60) as http:
            url = f"http://127.0.0.1:{port.port}/health"
            assert (await http.get(url, headers={"host": host})).status_code == status
    finally:
        await port.stop()
