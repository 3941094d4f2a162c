"""Tests of run configurations: parsing, defaults and error messages."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ludus.proto.config import (
    LanguageModelRun,
    NetworkRun,
    RewardModelRun,
    RunConfig,
    load_reward_model_config,
    load_run_config,
    load_sft_config,
    make_run_config,
)
from ludus.proto.errors import ConfigError, NotFoundError

EXAMPLE_FOLDER = Path(__file__).parents[2] / "examples"
REWARD_MODEL_EXAMPLE = EXAMPLE_FOLDER / "reward_model/tiny.toml"
FINE_TUNING_EXAMPLES = sorted(
    path
    for path in EXAMPLE_FOLDER.rglob("*.toml")
    if tomllib.loads(path.read_text()).get("kind") == "sft"
)
EXAMPLES = sorted(
    set(EXAMPLE_FOLDER.rglob("*.toml")) - {REWARD_MODEL_EXAMPLE, *FINE_TUNING_EXAMPLES}
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_valid(path: Path) -> None:
    assert load_run_config(path).training.num_steps > 0


def test_the_reward_model_example_is_valid() -> None:
    assert load_reward_model_config(REWARD_MODEL_EXAMPLE).epochs > 0


@pytest.mark.parametrize("path", FINE_TUNING_EXAMPLES, ids=lambda path: path.stem)
def test_every_fine_tuning_example_is_valid(path: Path) -> None:
    assert load_sft_config(path).training.num_epochs


@pytest.mark.parametrize(
    ("overrides", "message_parts"),
    [
        (["training.num_stesp=5"], ["training.num_stesp", "unknown key", "'num_steps'"]),
        (["model.widht=64"], ["model.widht", "did you mean 'width'"]),
        (["environment.options=3"], ["environment.options", "got 3"]),
        (["generator.kind=foo"], ["generator.kind", "'vllm', 'transformers'", "'foo'"]),
        (["training.num_steps=many"], ["training.num_steps", "got 'many'"]),
        (["rollout.group_size=1"], ["rollout.group_size", "greater than or equal to 2", "got 1"]),
        (["training.max_staleness=-1"], ["training.max_staleness", "got -1"]),
        (["learner.num_minibatches=5"], ["groups_per_step = 32", "5 equal parts", "35"]),
        (["model.width=100", "model.num_heads=3"], ["model.width", "num_heads = 3", "96"]),
        (["rollout.max_tokens=4096"], ["rollout.max_tokens = 4096", "model.max_tokens = 512"]),
        (["rollout.num_workers=9"], ["4608 sessions", "environment.max_sessions = 4096"]),
        (
            ["rollout.group_timeout_s=3600"],
            ["training.idle_timeout_s = 3600", "raise idle_timeout_s"],
        ),
        (["learner.betas=[0.9, 1]"], ["learner.betas.1", "less than 1", "got 1"]),
        (["learner.betas=[-0.1, 0.9]"], ["learner.betas.0", "greater than or equal to 0"]),
        (["learner.learning_rate=3"], ["learner.learning_rate", "less than or equal to 1"]),
        (["learner.weight_decay=500"], ["weight_decay = 500 times learner.learning_rate = 0.002"]),
        (["learner.num_gpus_per_rank=1.5"], ["learner.num_gpus_per_rank", "whole number", "1.5"]),
        (["rollout.num_gpus_per_worker=2.5"], ["num_gpus_per_worker", "whole number", "2.5"]),
        (["learner.num_threads=100000"], ["learner.num_threads", "1024", "got 100000"]),
        (["learner.collective_timeout_s=1e15"], ["collective_timeout_s", "less than or equal"]),
        (["rollout.temperature=1e-9"], ["rollout.temperature", "greater than or equal to 0.01"]),
        (["eval.temperature=1e-9"], ["eval.temperature", "0 (the most probable token)"]),
        (["rollout.repetition_penalty=1e30"], ["rollout.repetition_penalty", "equal to 100"]),
        (["model.width=129", "model.num_heads=3"], ["model.width = 129", "even number", "43"]),
        ([f"eval.seed={2**64}"], ["eval.seed", "2**63"]),
        (["metrics.prometheus.port=70000"], ["metrics.prometheus.port", "65535", "got 70000"]),
        (["algorithm.old_logprobs=rollout"], ["correction.kind = 'token_tis'", "twice"]),
        (["algorithm.loss.kind=gspo"], ["gspo", "aggregation = 'sequence_mean'"]),
        (["environment.render=a:b"], ["environment.parse"]),
        (
            [
                "environment.kind=remote",
                "environment.address=grpcs://a:1",
                "environment.tls.key_file=k",
            ],
            ["set cert_file too, or remove both"],
        ),
        (["environment.kind=remote"], ["environment.address", "required"]),
        (
            ["environment.random_policy=random"],
            ["random_policy = 'random'", "environment.baselines"],
        ),
        (["environment.rewards=[{weight: 1}]"], ["--set environment.rewards", "JSON or TOML"]),
        (["name=../../etc"], ["name", "'../../etc'"]),
        (
            ["generator.kind=vllm", "generator.max_model_tokens=511"],
            ["generator.max_model_tokens = 511", "rollout.max_tokens = 512"],
        ),
        (
            ["generator.kind=vllm", "generator.tensor_parallel_size=2"],
            ["tensor_parallel_size = 2", "rollout.num_gpus_per_worker = 0; set it to 2"],
        ),
    ],
)
def test_invalid_setting_error_contains_field_value_and_remedy(
    overrides: list[str], message_parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as exc_info:
        load_run_config(None, overrides)
    for message_part in message_parts:
        assert message_part in str(exc_info.value)


@pytest.mark.parametrize(
    ("field", "valid_values", "invalid_values"),
    [
        ("ppo.clip", (1e-6, 0.2, 1), (0, -0.2, 1.01, "nan")),
        ("ppo.learning_rate", (1e-9, 1), (0, -1, 1.5, "inf")),
        ("ppo.num_threads", (1, 1024), (0, 1025)),
        ("reward_model.learning_rate", (1e-9, 1), (0, -1, 1.5, "nan")),
        ("reward_model.weight_decay", (0, 0.99), (-0.1, 1, "inf")),
        ("reward_model.test_size", (0, 0.99), (-0.1, 1)),
        ("reward_model.num_threads", (1, 1024), (0, 1025)),
    ],
)
def test_lower_and_upper_bounds_are_checked(
    field: str, valid_values: tuple[object, ...], invalid_values: tuple[object, ...]
) -> None:
    section, name = field.split(".")

    def load(value: object) -> RunConfig | RewardModelRun:
        if section == "reward_model":
            return load_reward_model_config({"model": "m", "data": "d"}, [f"{name}={value}"])
        network_overrides = ["kind=network", "environment.package=gymnasium:CartPole-v1"]
        return load_run_config(None, [*network_overrides, f"{field}={value}"])

    for value in valid_values:
        assert load(value)
    for value in invalid_values:
        with pytest.raises(ConfigError, match=rf"{name}: .*got '?{value}'?$"):
            load(value)


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"(?s)seed.*training\.num_steps"):
        load_run_config(None, ["seed=-1", "training.num_steps=0"])


def test_overrides_are_json_or_text() -> None:
    run = load_run_config(None, ["name=a2024", "seed=7", "environment.options.game=blackjack"])
    assert run.environment.kind == "local"
    assert (run.seed, run.environment.options) == (7, {"game": "blackjack"})


def test_overrides_may_be_toml() -> None:
    rewards = "environment.rewards=[{}, {function = 'my.rewards:brief', weight = 0.5}]"
    run = load_run_config(None, [rewards, "environment.options={game = 'catch'}", "name='quoted'"])
    assert [term.weight for term in run.environment.rewards] == [1.0, 0.5]
    assert run.environment.rewards[1].function == "my.rewards:brief"
    assert (run.name, run.environment.options) == ("quoted", {"game": "catch"})


def test_list_of_unnamed_environments_fails() -> None:
    with pytest.raises(ConfigError, match=r"\[\[environment\]\].*\[environments\.<name>\]"):
        load_run_config(None, ['environment=[{package = "math_env"}]'])


def test_reward_model_error_suggests_the_train_reward_command() -> None:
    with pytest.raises(ConfigError, match="train its model with `ludus train-reward`"):
        make_run_config({"kind": "reward_model", "model": "org/model", "data": "rows.jsonl"})


def test_section_is_cleared_only_if_the_kind_changes() -> None:
    path = EXAMPLES[-1].with_name("tiny.toml")
    changed_run = load_run_config(path, ["model.kind=pretrained", "model.path=x"])
    assert changed_run.model.kind == "pretrained"
    assert changed_run.environment.policies is not None
    unchanged_run = load_run_config(path, ["model.kind=tiny", "environment.kind=local"])
    assert unchanged_run == load_run_config(path)


def test_section_without_kind_is_the_default_variant() -> None:
    run = load_run_config(None, ["generator.max_batch_size=8"])
    assert run.generator.kind == "transformers"


def test_engine_that_fits_the_rollout_settings_is_accepted() -> None:
    overrides = [
        "generator.max_model_tokens=512",
        "generator.tensor_parallel_size=2",
        "rollout.num_gpus_per_worker=2",
    ]
    run = load_run_config(None, ["generator.kind=vllm", *overrides])
    assert run.generator.kind == "vllm"


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"address": "grpc://127.0.0.1:9"}, "127-0-0-1-9"),
        ({"address": "http://me:secret@10.0.0.7:8000/"}, "10-0-0-7-8000"),
        ({"address": "grpc://blackjack:50051"}, "blackjack"),
        ({"address": "grpc://gateway:50051/chess"}, "chess"),
        ({"address": "ws://host:8000/poker/ws"}, "poker"),
        ({"package": "math_env"}, "math"),
        ({"package": "my.envs:Guess"}, "Guess"),
        ({"options": {"game": "catch"}}, "catch"),
    ],
)
def test_single_environment_name_comes_from_game_package_or_address(
    environment: dict[str, object], name: str
) -> None:
    kind = "remote" if "address" in environment else "local"
    run = LanguageModelRun.model_validate({"environment": {**environment, "kind": kind}})
    assert list(run.environments) == [name]
    assert run.environment_section(name) == "environment"
    environments = {name: run.environment, "other": run.environment}
    mixed_run = LanguageModelRun(environments=environments)
    assert mixed_run.environment_section(name) == f"environments.{name}"


def test_configuration_round_trips_through_json() -> None:
    run = load_run_config(None, ["generator.kind=vllm", "weights.kind=folder"])
    assert LanguageModelRun.model_validate_json(run.model_dump_json()) == run


def test_missing_file_error_mentions_the_examples(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nothing\.toml.*examples/"):
        load_run_config(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "= 3"), ("a.yaml", "a: [1"), ("a.json", "{"), ("a.ini", "")]
)
def test_unreadable_file_is_named_in_the_error(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=name.partition(".")[2]):
        load_run_config(path)


def test_override_without_a_value_fails() -> None:
    with pytest.raises(ConfigError, match=r"expected section\.field=value, got 'seed'"):
        load_run_config(None, ["seed"])


@pytest.mark.parametrize(
    ("overrides", "learning_rate"),
    [
        ([], 2e-3),
        (["learner.num_minibatches=2"], 2e-3),
        (["learner.learning_rate=0.5"], 0.5),
        (['model={"kind": "pretrained", "path": "Qwen/Qwen3-1.7B"}'], 1e-5),
        (["preset=trl"], 1e-6),
    ],
    ids=["default", "unrelated override", "explicit rate", "pretrained", "preset"],
)
def test_default_learning_rate_depends_on_the_kind_of_model(
    overrides: list[str], learning_rate: float
) -> None:
    assert load_run_config(None, overrides).learning_rate == learning_rate


@pytest.mark.parametrize(
    ("tree", "messages"),
    [
        ({"kind": "network"}, ["environments: required"]),
        ({"kind": "diffusion"}, ["kind: expected one of 'language_model', 'network'"]),
        ({"kind": "network", "rollout": {}}, ["rollout: unknown key"]),
        ({"kind": "network", "preset": "trl"}, ["preset: unknown key"]),
        ({"ppo": {}}, ["ppo: unknown key"]),
        ({"model": {"kind": "network"}}, ["model.kind: expected one of 'tiny', 'pretrained'"]),
    ],
)
def test_sections_of_another_run_kind_are_unknown_keys(
    tree: dict[str, object], messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as exc_info:
        make_run_config(tree)
    for message in messages:
        assert message in str(exc_info.value)


def test_defaults_depend_on_the_run_kind() -> None:
    network_run = make_run_config({"kind": "network", "environment": {"package": "gymnasium:A-v0"}})
    assert isinstance(network_run, NetworkRun)
    assert (network_run.eval.num_games, network_run.eval.temperature) == (100, 0.0)
    language_model_run = make_run_config({"kind": "language_model", "preset": "trl"})
    assert language_model_run.eval.num_games == 10_000
    assert language_model_run.training.num_steps == 100


def test_evaluation_seeds_are_never_training_seeds() -> None:
    assert load_run_config(None, [f"eval.seed={2**31}"]).eval.seed == 2**31
    with pytest.raises(ConfigError, match=r"eval.seed: .*at least 2147483648 .*, got 2147483647"):
        load_run_config(None, [f"eval.seed={2**31 - 1}"])
