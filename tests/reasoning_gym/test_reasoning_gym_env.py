"""Tests of reasoning-gym's generators: seeds, scores, options, text and names."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

import reasoning_gym_env
from ludus.env.catalogue.sources import CatalogueEntry
from ludus.env.check import check_environment
from ludus.env.targets.targets import environment_factory
from ludus.proto.errors import (
    ActionParseError,
    ConfigError,
    EpisodeStateError,
    NotFoundError,
)
from reasoning_gym_env import ReasoningGymAction, ReasoningGymObservation
from reasoning_gym_env.policies import fixed_policies
from reasoning_gym_env.targets import ReasoningGymTargets
from reasoning_gym_env.text import ReasoningGymRenderer

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is optional because it needs many packages in exact versions",
)
QUICK_GENERATORS = ("chain_sum", "countdown", "pool_matrix", "list_functions", "graph_color")


def make_environment(**options: Any) -> Any:
    """Return an environment in this process."""
    return reasoning_gym_env.make_environment(**options)


def answer_question(environment: Any, seed: int, answer: str) -> Any:
    """Return the last transition of an episode with this answer."""
    environment.reset(seed=seed)
    return environment.step(ReasoningGymAction(answer=answer))


def make_question(**fields: Any) -> ReasoningGymObservation:
    return ReasoningGymObservation(question="3 + 4 =\n", dataset="chain_sum", **fields)


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["chain_sum", "list_functions"])
def test_environment_contract(dataset: str) -> None:
    def make_with_options() -> Any:
        return make_environment(dataset=dataset)

    check_environment(make_with_options, seeds=range(2), num_steps=2).raise_if_failed()


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("dataset", QUICK_GENERATORS)
def test_seed_fixes_the_question_whatever_came_before(dataset: str) -> None:
    environment = make_environment(dataset=dataset)
    questions = [environment.reset(seed=seed).observation.question for seed in range(4)]
    random.seed(5)
    second = make_environment(dataset=dataset)
    assert [second.reset(seed=seed).observation.question for seed in (3, 1)] == questions[3:0:-2]
    assert len(set(questions)) > 1


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("dataset", QUICK_GENERATORS)
def test_solution_is_a_success_and_nonsense_is_none(dataset: str) -> None:
    environment = make_environment(dataset=dataset, shows_solution=True)
    policy = fixed_policies(environment.options)["solution"]
    for seed in range(3):
        observation = environment.reset(seed=seed).observation
        action = policy(observation.model_dump(), random.Random(0))
        transition = environment.step(ReasoningGymAction.model_validate(action))
        assert (transition.reward, transition.success, transition.terminated) == (1.0, True, True)
        assert answer_question(environment, seed, "no such answer").success is False


@needs_library
def test_global_random_state_and_standard_output_are_untouched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    random.seed(3)
    state = random.getstate()
    for dataset in ("list_functions", "bf"):
        make_environment(dataset=dataset).reset(seed=1)
    assert random.getstate() == state
    assert capsys.readouterr().out == ""


@needs_library
def test_fields_of_the_configuration_are_options() -> None:
    environment = make_environment(dataset="chain_sum", min_terms=2, max_terms=2, max_digits=1)
    assert environment.options["config"] == {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    question = environment.reset(seed=0).observation.question
    assert sum(sign in "+-" for sign in question.partition(":")[2]) == 1
    same = make_environment(**environment.options)
    assert same.reset(seed=0).observation.question == question
    names = [option.name for option in ReasoningGymTargets().list_options("chain_sum")]
    assert names[:2] == ["min_terms", "max_terms"] and "answer_format" in names


@needs_library
def test_mixture_draws_from_its_parts() -> None:
    parts = [
        {"name": "gcd", "weight": 3},
        {"name": "chain_sum", "config": {"max_terms": 2}},
    ]
    environment = make_environment(dataset="composite", datasets=parts, shows_solution=True)
    datasets = set()
    for seed in range(12):
        observation = environment.reset(seed=seed).observation
        datasets.add(observation.dataset)
        action = ReasoningGymAction(answer=observation.correct_answer)
        assert environment.step(action).reward == 1.0
    assert datasets == {"gcd", "chain_sum"}


@needs_library
@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("binary_matrix", "[open('{path}', 'w')]"),
        ("countdown", "open('{path}', 'w')"),
        ("countdown", "9**9**9**9"),
        ("prime_factorization", "x"),
    ],
)
def test_code_and_malformed_answers_get_zero_and_do_not_run(
    dataset: str, answer: str, tmp_path: Path
) -> None:
    path = tmp_path / "written"
    code = answer.replace("{path}", str(path))
    transition = answer_question(make_environment(dataset=dataset), 0, code)
    assert (transition.reward, transition.success) == (0.0, False)
    assert not path.exists()


@needs_library
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset": "chainsum"}, NotFoundError, "did you mean 'chain_sum'"),
        ({"dataset": "chain_sum", "min_term": 3}, ConfigError, "did you mean 'min_terms'"),
        ({"dataset": "chain_sum", "min_terms": "few"}, ConfigError, "min_terms: expected"),
        ({"dataset": "chain_sum", "min_terms": 9}, ConfigError, "max_terms must be"),
        ({"dataset": "composite"}, ConfigError, "at least one dataset"),
        ({"answer_format": "xml"}, ConfigError, "expected 'tags' or 'plain'"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_environment(**options)


@needs_library
def test_generator_with_unstable_sets_needs_a_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        make_environment(dataset="word_ladder")


@needs_library
def test_steps_outside_an_episode_are_refused() -> None:
    environment = make_environment()
    with pytest.raises(EpisodeStateError):
        environment.step(ReasoningGymAction(answer="1"))
    answer_question(environment, 0, "1")
    with pytest.raises(EpisodeStateError):
        environment.step(ReasoningGymAction(answer="1"))


@needs_library
def test_catalogue_lists_every_generator() -> None:
    from reasoning_gym.factory import DATASETS

    entries = {entry.name: entry for entry in ReasoningGymTargets().list_environments()}
    assert entries.keys() == DATASETS.keys()
    assert entries["gcd"] == CatalogueEntry(
        name="gcd", description="Gcd", family="reasoning_gym/arithmetic", text="readable"
    )


def test_missing_library_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym_env import names

    names.read_categories.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ludus\[reasoning-gym\]'"):
        list(ReasoningGymTargets().list_environments())
    names.read_categories.cache_clear()


def test_prompt_ends_with_the_format_rule() -> None:
    (message,) = ReasoningGymRenderer("tags").render(make_question(), first=True)
    rule = "End with your answer in tags: <answer>your answer</answer>"
    assert message["content"] == f"3 + 4 =\n\n{rule}"
    (message,) = ReasoningGymRenderer("tags").render(make_question(score=0.25), first=False)
    assert message["content"] == "The score is 0.25."


@pytest.mark.parametrize(
    ("answer_format", "text", "answer"),
    [
        ("tags", "<think>3 + 4 <answer>1</answer></think>It is <answer> 7 </answer>", "7"),
        ("tags", "<answer>1</answer> or rather\n<answer>7 8\n9</answer>", "7 8\n9"),
        ("tags", "7", "7"),
        ("plain", "7\n8", "7\n8"),
        ("plain", "<answer>7</answer>", "7"),
    ],
)
def test_answer_is_read_from_the_response(answer_format: Any, text: str, answer: str) -> None:
    renderer = ReasoningGymRenderer(answer_format)
    assert renderer.parse(text, make_question()).answer == answer


@pytest.mark.parametrize("text", ["", "3 + 4\nis 7", "<answer> </answer>", "\x00 7", "<think>7"])
def test_response_without_an_answer_is_refused(text: str) -> None:
    with pytest.raises(ActionParseError, match="End with your answer in tags"):
        ReasoningGymRenderer("tags").parse(text, make_question())


def test_solution_is_a_legal_answer_only_if_it_is_sent() -> None:
    renderer = ReasoningGymRenderer("tags")
    assert renderer.legal_answers(make_question()) == []
    assert renderer.legal_answers(make_question(correct_answer="7")) == ["<answer>7</answer>"]
    assert renderer.legal_answers(make_question(correct_answer="7", score=1.0)) == []


@needs_library
def test_sessions_of_a_server_have_separate_processes() -> None:
    factory = environment_factory("reasoning_gym_env", {"dataset": "gcd"})
    assert factory.isolation == "process" and not factory.needs_network
