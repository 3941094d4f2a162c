"""A real instruct model: tokens, log-probs, tools, adapters, the endpoint, resuming and exports.

The model is SmolLM2-135M-Instruct, which `ludus model get` writes to the cache of the checkout.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from openai import AsyncOpenAI
from safetensors.torch import load_file

from ludus.env import Message
from ludus.proto.config import GrpoConfig, LoraConfig, PretrainedModel, RolloutConfig, VllmGenerator
from ludus.trainer.core.interfaces import EngineOutput, EngineRequest
from ludus.trainer.core.types import Coefficients, Sampling, ScoringRequest
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_language_model
from ludus.trainer.models.tool_calls import ToolCall
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine
from tests.agents.exactness import RecordingEngine, compute_logprob_error
from tests.agents.wild_agent import assert_trained_tokens_are_exact
from tests.conformance.template_families import ADD_TOOL
from tests.e2e.runs import Run, start_run
from tests.learner.tiny_policy import make_batch, make_learner
from tests.rollout.engine_pair import complete, compute_logprobs, prepare_for_vllm

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
MODEL_FOLDER = ROOT / ".cache" / "models" / "smollm2"
EXAMPLE = ROOT / "examples" / "math" / "smollm2.toml"
LUDUS = "from ludus.services.cli.app import main; main()"
TOLERANCE = 1e-3
"""Tolerance of log-probs in nats, for 30 layers in float32."""
NO_PENALTY = Coefficients(learning_rate=1e-4, entropy=0.0, kl=0.0)
ALGORITHM = GrpoConfig(geometric_mask=None)
QUESTIONS = ["7 + 12 = ?", "What is the capital of France?", "Say hello.", "Naïve ♠ 東: repeat."]


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Return the model's folder; get the model first if the cache has none."""
    if not MODEL_FOLDER.is_dir():
        command = [sys.executable, "-c", LUDUS, "model", "get", "smollm2", str(MODEL_FOLDER)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            pytest.skip(f"SmolLM2 cannot be had: {result.stderr.strip().splitlines()[-1]}")
    return str(MODEL_FOLDER)


@pytest.fixture(scope="session")
def chat(smollm2: str) -> ChatTokenizer:
    """Return the model's tokenizer."""
    return ChatTokenizer.load(smollm2, PretrainedModel(path=smollm2))


@pytest.fixture
def single_rank_group(tmp_path: Path) -> Iterator[None]:
    """Create a gloo process group whose only rank is this process."""
    torch.set_num_threads(1)
    rendezvous = tmp_path / "store"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    if dist.is_initialized():  # vLLM destroys the group when it is closed
        dist.destroy_process_group()


def make_conversation(*texts: str, system: str = "") -> list[Message]:
    """Return messages of the user and the assistant in turn, after an optional system message."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, text in enumerate(texts):
        messages.append({"role": "assistant" if index % 2 else "user", "content": text})
    return messages


def make_requests(chat: ChatTokenizer) -> list[EngineRequest]:
    """Return requests for completions of the questions, two of each."""
    return [
        EngineRequest(index, chat.encode_first_prompt(make_conversation(question)),
                      Sampling(1.0, 8), seed=index)
        for index, question in enumerate(QUESTIONS * 2)
    ]  # fmt: skip


def make_scoring_requests(
    requests: list[EngineRequest], outputs: dict[int, EngineOutput]
) -> list[ScoringRequest]:
    """Return requests to score the sampled completions."""
    return [
        ScoringRequest(request.prompt_ids, outputs[request.request_id].token_ids)
        for request in requests
    ]


def get_logprobs(
    requests: list[EngineRequest], outputs: dict[int, EngineOutput]
) -> list[list[float]]:
    """Return the sampler's log-probs in the order of the requests."""
    return [outputs[request.request_id].logprobs for request in requests]


def compute_max_difference(scores: list[list[float]], expected: list[list[float]]) -> float:
    """Return the largest difference between log-probs of the same completions."""
    pairs = [
        pair for rows in zip(scores, expected, strict=True) for pair in zip(*rows, strict=True)
    ]
    return max(abs(score - expected_score) for score, expected_score in pairs)


def assert_close(scores: list[list[float]], expected: list[list[float]]) -> None:
    assert compute_max_difference(scores, expected) < TOLERANCE


@pytest.mark.parametrize("system", ["", "You are a calculator."])
def test_conversation_tokens_equal_the_chat_template(chat: ChatTokenizer, system: str) -> None:
    generator = random.Random(f"conversations {system}")
    for _ in range(20):
        texts = generator.choices([*QUESTIONS, "Two\nlines", "a  b", "1,000.5%"], k=5)
        first_messages = make_conversation(texts[0], system=system)
        token_ids = chat.encode_first_prompt(first_messages)
        for answer, question in ((texts[1], texts[2]), (texts[3], texts[4])):
            token_ids += chat.encode_completion(answer)
            token_ids += chat.encode_next_prompt(make_conversation(question), has_end_token=True)
        assert token_ids == chat.tokenizer.apply_chat_template(
            make_conversation(*texts, system=system), add_generation_prompt=True, return_dict=False
        )


def test_call_in_the_form_of_the_template_is_parsed(chat: ChatTokenizer) -> None:
    chat.check_tools([ADD_TOOL])
    prompt_ids = chat.encode_first_prompt(make_conversation("Add."), [ADD_TOOL])
    prompt = chat.tokenizer.decode(prompt_ids)
    assert '"find_sum"' in prompt and prompt.endswith("<|im_start|>assistant\n")
    arguments = {"word": "two", "number": 3}
    call = json.dumps({"name": "find_sum", "arguments": arguments})
    text = chat.decode(chat.encode_completion(f"I call it. <tool_call>\n{call}\n</tool_call>"))
    assert chat.call_form.read_calls(text, [ADD_TOOL]) == [ToolCall("find_sum", arguments)]


@pytest.mark.usefixtures("single_rank_group")
def test_adapters_are_trained_and_merged_into_the_exported_model(
    smollm2: str, chat: ChatTokenizer, tmp_path: Path
) -> None:
    learner = make_learner(smollm2, ALGORITHM, lora=LoraConfig(rank=4), learning_rate=1e-3)
    request = ScoringRequest(chat.encode_first_prompt(make_conversation("Hi")), [19556, 28, 2])
    [start_scores] = learner.score_completions([request])
    learner.train_step(make_batch(num_samples=6), NO_PENALTY)
    [scores] = learner.score_completions([request])
    assert scores != pytest.approx(start_scores, abs=TOLERANCE)
    assert all("lora_" in name for name in learner.gather_weights())
    learner.export_model(tmp_path / "model")
    model = load_language_model(tmp_path / "model")
    exported_scores = compute_logprobs(model, request.prompt_ids, request.completion_ids)
    assert exported_scores == pytest.approx(scores, abs=TOLERANCE)


async def test_trained_tokens_equal_tokens_sampled_over_the_endpoint(
    smollm2: str, chat: ChatTokenizer
) -> None:
    model = load_language_model(smollm2)
    limits = RolloutConfig(max_completion_tokens=12, max_tokens=512, max_turns=8)
    endpoint = AgentEndpoint()
    await endpoint.start()
    with closing(AsyncEngine(TransformersEngine(model, end_token_ids=chat.end_token_ids))) as base:
        engine = RecordingEngine(base)
        tree = ConversationTree(engine, chat, limits, Sampling(1.0, 1), key=0)
        with endpoint.open_episode(tree) as episode:
            access = episode.access
            async with AsyncOpenAI(api_key=access.api_key, base_url=access.base_url) as client:
                messages = make_conversation(QUESTIONS[0], system="Be brief.")
                for question in QUESTIONS[1:3]:
                    completion = await client.chat.completions.create(
                        model="any",
                        messages=messages,  # type: ignore[arg-type]
                    )
                    answer = completion.choices[0].message.content or ""
                    messages += [{"role": "assistant", "content": answer}]
                    messages += make_conversation(question)
        sequences = tree.make_sequences()
    await endpoint.stop()
    assert_trained_tokens_are_exact(sequences, engine.samples)
    assert len(engine.samples) == 2
    assert compute_logprob_error(model, sequences) < TOLERANCE


def test_resumed_run_equals_an_uninterrupted_run(smollm2: str, tmp_path: Path) -> None:
    settings = (
        f"model.path={json.dumps(smollm2)}",
        "model.lora.rank=4",
        *("rollout.group_size=4", "rollout.num_groups_in_flight=2"),
        *("algorithm.correction.kind=off", "algorithm.geometric_mask=null"),
        "algorithm.zero_variance_groups=keep",
        "algorithm.entropy_coef=0.01",
        "learner.warmup_steps=0",
        *("training.num_steps=2", "training.groups_per_step=2", "training.max_staleness=0"),
        "training.checkpoint_every_steps=1",
        *("eval.num_games=4", "eval.num_games_during=0", "environment.baselines=[]"),
    )
    with start_run(tmp_path, *settings, config=EXAMPLE) as full_run:
        full_run.finish()
    first_weights, full_weights = load_adapters(full_run, 1), load_adapters(full_run, 2)
    shutil.rmtree(full_run.folder / "checkpoints" / "step-00000002")
    with start_run(tmp_path, *settings, flags=("--resume",), config=EXAMPLE) as resumed_run:
        resumed_run.finish()
    resumed_weights = load_adapters(resumed_run, 2)
    assert full_weights.keys() == resumed_weights.keys()
    assert all(torch.equal(full_weights[name], resumed_weights[name]) for name in full_weights)
    assert any(not torch.equal(first_weights[name], full_weights[name]) for name in full_weights)


def load_adapters(run: Run, step: int) -> dict[str, torch.Tensor]:
    """Return the adapters in a checkpoint."""
    folder = run.folder / "checkpoints" / f"step-{step:08d}" / "model" / "adapter"
    return load_file(folder / "adapter_model.safetensors")


def test_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    command = [sys.executable, "-c", LUDUS, "model", "convert", "damaged.gguf", "folder"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "cannot be had" in result.stderr:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 2
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "damaged.gguf' cannot be converted: " in error
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.gguf"]


@pytest.mark.usefixtures("single_rank_group")
def test_sampler_and_learner_agree_on_every_layout_and_after_an_export(
    smollm2: str, chat: ChatTokenizer, tmp_path: Path
) -> None:
    """Test both layouts of the learner, transformers, and vLLM with the exported model."""
    requests, folder = make_requests(chat), tmp_path / "exported"
    engine = TransformersEngine(load_language_model(smollm2), end_token_ids=chat.end_token_ids)
    outputs = complete(engine, requests)
    scoring_requests = make_scoring_requests(requests, outputs)
    del engine
    batch, metrics = make_batch(num_samples=6, num_prefix_tokens=12), []
    for packing in ("pad", "tree"):
        learner = make_learner(smollm2, ALGORITHM, learning_rate=1e-4, packing=packing)
        assert_close(learner.score_completions(scoring_requests), get_logprobs(requests, outputs))
        step = learner.train_step(batch, NO_PENALTY)
        metrics.append((step.loss, step.grad_norm))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3)
    learner.export_model(folder)
    trained_scores = learner.score_completions(scoring_requests)
    del learner
    assert compute_max_difference(trained_scores, get_logprobs(requests, outputs)) > TOLERANCE
    model = load_language_model(folder)
    exported_scores = [
        compute_logprobs(model, request.prompt_ids, request.completion_ids)
        for request in scoring_requests
    ]
    assert_close(exported_scores, trained_scores)
    with prepare_for_vllm():
        from ludus.trainer.rollout.engines.vllm_engine import VllmEngine

        config = VllmGenerator(max_num_seqs=16)
        with closing(
            VllmEngine(
                str(folder), config, end_token_ids=sorted(chat.end_token_ids), max_tokens=128,
                dtype="float32",
            )
        ) as vllm:  # fmt: skip
            assert_close([vllm.score(request) for request in scoring_requests], trained_scores)
            outputs = complete(vllm, requests)
    expected = [
        compute_logprobs(model, request.prompt_ids, outputs[request.request_id].token_ids)
        for request in requests
    ]
    assert_close(get_logprobs(requests, outputs), expected)
