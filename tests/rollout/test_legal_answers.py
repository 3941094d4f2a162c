"""Episodes whose completions are restricted to the legal answers of the current state."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.types import StepResult, TextView
from ludus.proto.config import LanguageModelRun, load_run_config, require_language_model
from ludus.proto.config.changes import find_changes
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Resume
from ludus.trainer.core.types import GroupSpec, RolloutStatus
from ludus.trainer.driver.checks import check_first_prompts, check_start
from ludus.trainer.driver.model_evaluation import ModelEvaluationRequest, evaluate_models
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.environment_adapter import make_renderer
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.legal_answers import LegalAnswers
from ludus.trainer.rollout.runner import sampling_settings
from ludus.trainer.setup.environments import ConnectedEnvironment
from tests.rollout.chat_templates import (
    CHANNELS,
    FAMILIES,
    OPEN_THOUGHT,
    Family,
    make_family_tokenizer,
)
from tests.rollout.engine_pair import make_folder, make_transformers_engine
from tests.rollout.scripted_policy import start_player

CONSTRAINT = "rollout.constrain=legal_answers"


def make_result(*answers: str) -> StepResult:
    return StepResult({}, text=TextView([{"role": "user", "content": "?"}], list(answers)))


def make_run(*overrides: str) -> LanguageModelRun:
    settings = [CONSTRAINT, "environment.options.game=blackjack", *overrides]
    return require_language_model(load_run_config(None, settings), "the test")


@pytest.mark.parametrize("family", [*FAMILIES, CHANNELS], ids=str)
def test_answers_are_encoded_as_the_template_writes_them(family: Family) -> None:
    chat = ChatTokenizer(make_family_tokenizer(family))
    legal_answers = LegalAnswers(chat, "game", max_completion_tokens=40)
    trie = legal_answers.make_trie(make_result("HIT", "HIT 2", "STAND", "HIT"))
    for answer in ("HIT", "HIT 2", "STAND"):
        token_ids = chat.encode_completion(answer, add_prefix=True)
        assert len(trie.list_allowed_ids(token_ids)) == len(token_ids)
        assert token_ids[-1] == chat.end_token_id
    assert legal_answers.make_trie(make_result("HIT", "HIT 2", "STAND", "HIT")) is trie


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], r"environment 'game' lists none in a state"),
        (
            [str(i) for i in range(1025)],
            r"at most 1024 legal answers, but environment 'game'.*1025",
        ),
        (
            ["HIT", "x" * 50],
            r"'x+' of environment 'game' has \d+ tokens.*max_completion_tokens = 8",
        ),
        (["x" * 9999], r"'x{100}' of environment 'game' has 9999 characters"),
    ],
    ids=["none", "many", "long", "huge"],
)
def test_answers_that_cannot_be_sampled_are_refused(
    chat: ChatTokenizer, answers: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LegalAnswers(chat, "game", max_completion_tokens=8).make_trie(make_result(*answers))
    with pytest.raises(ConfigError, match="environment 'game' lists none"):
        LegalAnswers(chat, "game", max_completion_tokens=8).make_trie(StepResult({}))


def test_template_that_opens_a_thought_is_refused() -> None:
    legal_answers = LegalAnswers(ChatTokenizer(make_family_tokenizer(OPEN_THOUGHT)), "game", 40)
    with pytest.raises(ConfigError, match=r"'HIT' of environment 'game' is read as ''.*thoughts"):
        legal_answers.make_trie(make_result("HIT"))


async def test_untrained_policy_plays_only_legal_actions(
    client: AsyncEnvClient, tmp_path: Path
) -> None:
    path = make_folder(tmp_path, tie_embeddings=False)
    run = make_run("rollout.max_completion_tokens=8", "rollout.max_tokens=128")
    chat = ChatTokenizer.load(path, run.model)
    engine = AsyncEngine(make_transformers_engine(path))
    try:
        player = await start_player(run, "blackjack", client, engine, chat)
        specs = [GroupSpec(index, "blackjack", (index,) * 4) for index in range(4)]
        sampling = sampling_settings(run.rollout)
        groups = await player.play_groups(specs, sampling, [1] * 4)
        evaluation_rollouts = await player.evaluate(range(8), sampling)
    finally:
        engine.close()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.status for rollout in [*rollouts, *evaluation_rollouts]} == {
        RolloutStatus.TERMINATED
    }
    answers = {turn.answer for group in groups for turn in group.transcripts[0].turns}
    assert answers <= {"HIT", "STAND"}
    for rollout in rollouts:
        [sequence] = rollout.sequences
        assert sequence.allowed_ids is not None
        sampled_ids = sequence.token_ids[sequence.loss_mask]
        for token_id, allowed_ids in zip(sampled_ids, sequence.allowed_ids, strict=True):
            assert token_id in allowed_ids


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("environment.tools=true", "tools"),
        ("environment.rollout=tests.rollout.reward_functions:play_in_pairs", "rollout"),
        ('environment.agent={"kind": "in_process", "function": "module:play"}', "agent"),
        ('environment={"render": "m:render", "parse": "m:parse"}', "parse"),
    ],
)
def test_settings_with_other_completions_are_refused_by_name(setting: str, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"constrain = 'legal_answers'.*\.{field} of.*remove"):
        load_run_config(None, [CONSTRAINT, setting])


def test_thinking_is_refused() -> None:
    model = 'model={"kind": "pretrained", "path": "org/model", "enable_thinking": true}'
    with pytest.raises(ConfigError, match=r"no room for thoughts, but model.enable_thinking"):
        make_run(model)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("package=tests.rollout.calculator_env:CalculatorEnv", "lists none in a state"),
        ('options={"limit": 4000}', r"lists \d+ in a state"),
    ],
)
def test_dry_run_names_the_environment_without_a_short_list_of_answers(
    tmp_path: Path, setting: str, problem: str
) -> None:
    settings = [f"environments.sums.{setting}" for setting in ("package=math_env", setting)]
    overrides = [CONSTRAINT, f"output_dir={tmp_path}", *settings]
    run = require_language_model(load_run_config(None, overrides), "the test")
    with pytest.raises(ConfigError, match=f"environment 'sums' {problem}"):
        check_start(run, Resume.NEVER)


async def test_start_checks_that_answers_fit(client: AsyncEnvClient, chat: ChatTokenizer) -> None:
    address, description = "address", await client.describe()
    for max_completion_tokens, is_long_enough in ((1, False), (8, True)):
        run = make_run(f"rollout.max_completion_tokens={max_completion_tokens}")
        [(name, config)] = run.environments.items()
        renderer = make_renderer(config, name)
        connected = ConnectedEnvironment(config, address, client, description, renderer)
        check = check_first_prompts(run, {name: connected}, chat)
        if is_long_enough:
            await check
            continue
        with pytest.raises(
            ConfigError, match=r"environment 'blackjack' has .* tokens with its end"
        ):
            await check


def test_resumed_run_must_keep_the_restriction() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.constrain was 'legal_answers' and is 'none'"):
        find_changes(make_run(), make_run("rollout.constrain=none"))


def test_endpoint_is_refused(tmp_path: Path) -> None:
    run = make_run("rollout.max_tokens=200")
    request = ModelEvaluationRequest(("m",), (), "http://127.0.0.1:9/v1", "TOKEN", tmp_path)
    with pytest.raises(ConfigError, match=r"--endpoint samples texts that rollout\.constrain"):
        evaluate_models(run, request)
