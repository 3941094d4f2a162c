"""Seeds, rewards and the end of an episode in Gymformer's language environments."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from ludus.env.check import check_environment
from ludus.env.targets.targets import environment_factory
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.env.cot_env import (
    CoTEnv,
    make_sums,
    read_problems,
    split_problems,
)
from ludus.trainer.compat.gymformer.env.rewards import (
    distance_to_answer,
    distances_to_answers,
    summary_reward,
    summary_rewards,
)
from ludus.trainer.compat.gymformer.env.rlhf_env import RLHFEnv
from ludus.trainer.compat.gymformer.env.summarization_env import ARTICLES, SummarizationEnv
from ludus.trainer.compat.gymformer.env.token_env import TokenEnv
from ludus.trainer.compat.gymformer.rl.transformers_nn import LMActorNetwork
from tests.compat.readme_environment import SummarizationEnv as ReadmeEnvironment
from tests.compat.tiny_models import tiny_model

WORDS = " ".join(article.text for article in ARTICLES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return tiny_model(folder, [WORDS, "<final_answer> </final_answer> 0 1 2 3 4 5 6 7 8 9"])


def play(environment: TokenEnv, text: str) -> tuple[float, bool, bool, dict]:
    """Play the tokens of `text` and an end token; return the result of the last step."""
    token_ids = environment.tokenizer.encode(text, add_special_tokens=False)
    for token_id in [*token_ids, environment.tokenizer.eos_token_id]:
        _, reward, terminated, truncated, info = environment.step(token_id)
        if terminated or truncated:
            break
        assert reward == 0
    return reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>3 + 4</think><final_answer>7</final_answer>", 0),
        ("<final_answer> 7.0 </final_answer>", 0),
        ("<final_answer>-3</final_answer>", -10),
        ("<final_answer>1,007</final_answer>", -1000),
        ("<final_answer>1</final_answer> no, <final_answer>9</final_answer>", -2),
        ("<final_answer>seven</final_answer>", -5),
        ("<final_answer></final_answer>", -5),
        ("<final_answer>nan</final_answer>", -5),
        ("<final_answer>inf</final_answer>", -5),
        ("<final_answer>-Infinity</final_answer>", -5),
        ("<final_answer>1e999</final_answer>", -5),
        ("<final_answer>" + "9" * 400 + "</final_answer>", -5),
        ("<final_answer>1_0</final_answer>", -5),
        ("<final_answer>\u0667</final_answer>", -5),
        ("<final_answer>7", -10),
        ("7", -10),
        ("", -10),
    ],
)
def test_reward_is_the_negative_distance_from_the_solution(text: str, reward: float) -> None:
    assert distance_to_answer(text, 7.0) == reward


def test_the_best_summary_has_ten_words_and_all_terms() -> None:
    for article, best_reward in zip(ARTICLES, (1.6, 1.4), strict=True):
        terms = article.key_terms
        rewards = {
            summary_reward(" ".join([*words, *["so"] * (length - len(words))]), terms)
            for size in range(len(terms) + 1)
            for words in itertools.combinations(terms, size)
            for length in range(size, 61)
        }
        assert max(rewards) == pytest.approx(best_reward)


def test_reward_functions_score_only_the_responses_of_the_policy() -> None:
    completions = [
        [{"role": "assistant", "content": "<final_answer>4</final_answer>"}],
        [{"role": "user", "content": "<final_answer>4</final_answer>"}],
    ]
    assert distances_to_answers(completions, answer=[7, "4"], seed=[1, 2]) == [-3, -10]
    summary = [[{"role": "assistant", "content": "Fish fish fish"}]]
    assert summary_rewards(summary, key_terms=[["fish", "species"]]) == pytest.approx([0.2])


@pytest.mark.slow
def test_registration_imports_no_heavy_package() -> None:
    program = (
        "import sys, gymnasium, ludus.trainer.compat.gymformer.env; "
        "print(sorted(i for i in gymnasium.registry if i.endswith('Env-v0'))); "
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.stdout.splitlines() == [
        "['CoTEnv-v0', 'RLHFEnv-v0', 'SummarizationEnv-v0']",
        "[]",
    ], process.stderr


@pytest.mark.slow
def test_same_seed_selects_the_same_article(model: str) -> None:
    environment = SummarizationEnv(model)
    initial_states = [environment.reset(seed=seed)[0] for seed in range(8)]
    assert initial_states == [environment.reset(seed=seed)[0] for seed in range(8)]
    assert len(set(initial_states)) == 2
    assert all(tokens in environment.observation_space for tokens in initial_states)
    states_by_constructor_seed = [
        SummarizationEnv(model, seed=seed).reset()[0] for seed in range(8)
    ]
    assert states_by_constructor_seed == [
        SummarizationEnv(model, seed=seed).reset()[0] for seed in range(8)
    ]
    assert len(set(states_by_constructor_seed)) == 2


@pytest.mark.slow
def test_a_returned_state_does_not_change(model: str) -> None:
    environment = SummarizationEnv(model)
    state, _ = environment.reset(seed=0)
    num_tokens = len(state)
    environment.step(7)
    assert len(state) == num_tokens


def test_only_a_complete_summary_has_a_reward(
    model: str,
) -> None:
    environment = SummarizationEnv(model, max_generation=6)
    _, info = environment.reset(seed=0)
    [article] = [article for article in ARTICLES if article.text == info["article"]]
    term = article.key_terms[0]
    reward, terminated, truncated, info = play(environment, term)
    assert (reward, terminated, truncated) == (pytest.approx(0.2), True, False)
    assert info["answer"] == term
    environment.reset(seed=0)
    reward, terminated, truncated, _ = play(environment, "fish " * 8)
    assert (reward, terminated, truncated) == (0.0, False, True)


def test_cot_reward_is_given_for_the_answer_and_at_the_token_limit(model: str) -> None:
    environment = CoTEnv(model, max_generation=40)
    _, info = environment.reset(seed=1)
    solution = sum(int(number) for number in info["question"].split("+"))
    reward, terminated, _, info = play(environment, f"<final_answer>{solution}</final_answer>")
    assert (reward, terminated, info["solution"]) == (0, True, solution)
    environment.reset(seed=1)
    reward, terminated, truncated, info = play(environment, "0 1 2 3 4 5 6 7 8 9 " * 4)
    assert (reward, terminated, truncated, info["is_cut_off"]) == (-10, True, False, True)


@pytest.mark.slow
def test_test_problems_are_not_used_in_training(model: str) -> None:
    environment = CoTEnv(model)
    questions = {
        split: {
            environment.reset(seed=seed, options={"split": split})[1]["question"]
            for seed in range(300)
        }
        for split in ("train", "test")
    }
    assert not questions["train"] & questions["test"]
    assert len(questions["test"]) == round(0.1 * len(make_sums(10)))
    with pytest.raises(ConfigError, match="'train' or 'test'"):
        environment.reset(options={"split": "dev"})


def test_sums_below_ten_have_two_or_three_numbers() -> None:
    problems = make_sums(10)
    assert len(problems) == 55 + 220
    assert all(problem.solution < 10 for problem in problems)


def test_solution_is_read_from_an_answer_with_an_explanation(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    rows = [
        {"question": "Two and two?", "answer": "Two and two are four.\n#### 4"},
        {"question": "A thousand and one?", "answer": 1001},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [problem.solution for problem in read_problems(path)] == [4, 1001]
    path.write_text(json.dumps({"question": "Why?", "answer": "because"}))
    with pytest.raises(ConfigError, match="row 1: the answer must be a number"):
        read_problems(path)


def test_equal_questions_are_in_the_same_split() -> None:
    problems = make_sums(4) * 3
    split = split_problems(problems, 0.3, seed=1)
    train_set, test_set = ({problem.question for problem in part} for part in split.values())
    assert not train_set & test_set and sum(map(len, split.values())) == len(problems)
    with pytest.raises(ConfigError, match="leaves no training problems"):
        split_problems(problems[:1], 0.9, seed=1)


def test_reward_model_scores_the_whole_completion_at_the_last_token(model: str) -> None:
    def score_length(prompts, completions):
        return [len(completion) for completion in completions]

    environment = RLHFEnv(model, score_length, ["fish", "species"], max_generation=8)
    environment.reset(seed=0)
    reward, terminated, *_ = play(environment, "a new species")
    assert (reward, terminated) == (len("a new species"), True)
    environment.reset(seed=0)
    reward, terminated, *_ = play(environment, "a new species of fish of fish of fish")
    assert reward > 0 and terminated


@pytest.mark.slow
def test_reference_policy_gets_no_kl_penalty(model: str) -> None:
    environment = RLHFEnv(model, lambda prompts, completions: [0.0], ["fish"], kl_coef=2.0)
    actor = LMActorNetwork(model, pad_token_id=0)
    state, _ = environment.reset(seed=0)
    logprobs = []
    generator = np.random.default_rng(0)
    for _ in range(12):
        with torch.no_grad():
            distribution = actor(torch.tensor(state)).log_softmax(-1)
        token_id = int(generator.integers(len(distribution)))
        logprobs.append(distribution[token_id])
        state, *_ = environment.step(token_id)
    policy_logprobs = torch.stack(logprobs)
    assert (policy_logprobs - environment.ref_logprobs()).abs().max() < 1e-5
    assert environment.kl_rewards(policy_logprobs).abs().mean() < 1e-6 * 2
    assert environment.kl_rewards(policy_logprobs + 0.5).tolist() == pytest.approx(
        [-1.0] * 12, abs=1e-4
    )


@pytest.mark.parametrize("scores", [[], [float("nan")], [None], 1.0, [1.0, 2.0]])
def test_a_reward_function_without_a_finite_score_is_refused(model: str, scores: Any) -> None:
    environment = RLHFEnv(model, lambda prompts, completions: scores, ["fish"], max_generation=1)
    environment.reset(seed=0)
    with pytest.raises(ConfigError, match="reward_model must return a list of one finite score"):
        environment.step(5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_model": None}, "reward_model must be a folder or a function"),
        ({"dataset": None}, "dataset must be a path or a non-empty list"),
        ({"dataset": [5]}, r"list of strings, got \[5\]"),
    ],
)
def test_an_invalid_reward_model_or_data_set_is_refused(
    model: str, changes: dict[str, Any], message: str
) -> None:
    arguments = {"reward_model": lambda prompts, completions: [0.0], "dataset": ["fish"]}
    with pytest.raises(ConfigError, match=message):
        RLHFEnv(model, **{**arguments, **changes})


def test_an_unknown_option_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"options must contain only split, got \['spilt'\]"):
        CoTEnv(model).reset(options={"spilt": "test"})


def test_an_environment_without_prompts_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="non-empty list"):
        RLHFEnv(model, lambda prompts, completions: [0.0], [])
    with pytest.raises(ConfigError, match="max_generation"):
        SummarizationEnv(model, max_generation=0)


@pytest.mark.slow
def test_language_environments_pass_all_checks(model: str) -> None:
    import ludus.trainer.compat.gymformer.env  # noqa: F401 - registers the environments

    for name in ("SummarizationEnv-v0", "CoTEnv-v0"):
        factory = environment_factory(f"gymnasium:{name}", {"model_name": model})
        check_environment(factory).raise_if_failed()


class SeededReadmeEnvironment(ReadmeEnvironment):
    """The README's environment with a `reset` that seeds `random`."""

    def reset(self, *, seed=None, options=None):
        random.seed(seed)
        return super().reset(seed=seed, options=options)


@pytest.mark.slow
def test_readme_environment_breaks_only_seed_rules(model: str) -> None:
    broken_rules = {}
    for environment_class in (ReadmeEnvironment, SeededReadmeEnvironment):
        env_id = f"ludus-tests/{environment_class.__name__}Contract-v0"
        gymnasium.register(env_id, environment_class, kwargs={"model_name": model})
        report = check_environment(environment_factory(f"gymnasium:{env_id}", {}))
        broken_checks = [check for check in report.checks if check.verdict == "broken"]
        broken_rules[environment_class] = {check.name for check in broken_checks}
    assert broken_rules[SeededReadmeEnvironment] == set()
    # The environment ignores the seed, so the rules that play a seed twice usually fail.
    assert "same_seed_and_actions_give_the_same_episode" in broken_rules[ReadmeEnvironment]
