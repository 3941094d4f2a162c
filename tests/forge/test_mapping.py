"""Forge's configuration as a run of Ludus: each key is honoured, named as unused, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from ludus.proto.config import LanguageModelRun, run_config_from
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.compat.forge import load_forge_config
from ludus.trainer.compat.forge.known_keys import known_keys
from ludus.trainer.compat.forge.mapping import MappedConfig, run_tree
from ludus.trainer.compat.forge.values import KINDS
from tests.forge.tutorial_config import tutorial_config


def mapped(*overrides: str, has_gpu: bool = True) -> MappedConfig:
    config = load_forge_config(tutorial_config(), overrides)
    return run_tree(config, name="blackjack", has_gpu=has_gpu)


def run_of(*overrides: str, has_gpu: bool = True) -> LanguageModelRun:
    return run_config_from(mapped(*overrides, has_gpu=has_gpu).tree)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def test_the_tutorials_own_file_says_what_it_says_there() -> None:
    run = run_of()
    assert (run.name, run.preset) == ("blackjack", "torchforge")
    assert run.model.model_dump()["path"] == "Qwen/Qwen3-1.7B"
    assert (run.rollout.group_size, run.training.groups_per_step) == (4, 2)
    assert (run.rollout.max_tokens, run.rollout.max_completion_tokens) == (544, 32)
    assert (run.training.num_steps, run.training.max_staleness) == (1000, 1)
    assert run.training.checkpoint_every_steps == 500
    assert (run.learner.learning_rate, run.learner.eps, run.learner.warmup_steps) == (1e-5, 1e-8, 1)
    assert (run.learner.dtype, run.learner.activation_checkpointing) == ("bfloat16", True)
    assert (run.generator.kind, run.rollout.num_gpus_per_worker) == ("vllm", 1)
    assert (run.algorithm.kl_coef, run.algorithm.aggregation) == (0.1, "sequence_mean")
    assert run.environment.model_dump()["address"] == "http://localhost:8004"
    assert run.metrics.wandb is not None
    assert run.metrics.wandb.project == "blackjack-grpo-tutorial"


def test_a_machine_without_gpus_takes_transformers_and_says_what_vllm_would_have_taken() -> None:
    assert run_of(has_gpu=False).generator.kind == "transformers"
    assert "policy.engine_args.enforce_eager" in mapped(has_gpu=False).unused
    assert "policy.engine_args.enforce_eager" not in mapped().unused


def test_what_means_nothing_here_is_named() -> None:
    assert {
        "metric_logging.wandb.group",
        "metric_logging.console.reduce_across_ranks",
        "trainer.checkpoint.async_mode",
        "trainer.training.gc_freq",
        "services.ref_model.procs",
        "actors.compute_advantages.mesh_name",
    } <= set(mapped().unused)


OTHER_OF = {"trainer.training.seq_len": 100, "policy.sampling_params.n": 3}
"""A limit, of which only less says anything else; and what is 1 or the size of a group."""
OTHER = {bool: lambda value: not value, int: lambda value: value + 4000, float: lambda v: v / 2}


@pytest.mark.parametrize("key", [key for key, _ in leaves(tutorial_config())])
def test_a_key_that_is_not_named_as_unused_changes_the_run_or_is_refused(key: str) -> None:
    before = mapped()
    if key in before.unused:
        return
    value = dict(leaves(tutorial_config()))[key]
    other = OTHER_OF.get(key, OTHER.get(type(value), lambda _: "something-else")(value))
    try:
        after = mapped(f"{key}={str(other).lower()}")
        assert after.tree != before.tree or key in after.unused
    except ConfigError as error:
        assert key.rpartition(".")[2] in str(error)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("group_sizes=8", "group_sizes: unknown, did you mean 'group_size'?"),
        ("trainer.optimizer.learning_rate=1", "trainer.optimizer.learning_rate: unknown"),
        ("trainer.optimiser.lr=1", "trainer.optimiser.lr: unknown"),
        ("rollout.temperature=1", "fields of Ludus stand in section ludus"),
        ("local_batch_size=6", "local_batch_size = 6 on 1 ranks is no multiple of group_size = 4"),
        ("trainer.optimizer.name=Adam", "trainer.optimizer.name = 'Adam' must be AdamW"),
        ("trainer.activation_checkpoint.mode=half", "expected one of none, selective, full"),
        ("trainer.parallelism.tensor_parallel_degree=2", "data_parallel_shard_degree"),
        ("replay_buffer.max_policy_age=3", "these mean one thing here; make them equal"),
        ("replay_buffer.dp_size=2", "but the trainer has 1 data-parallel ranks"),
        ("policy.engine_args.model=other/model", "expected one model, got several"),
        ("policy.sampling_params.n=3", "expected 1, or group_size = 4"),
        ("policy.engine_args.dtype=float32", "log-probs of the two are compared"),
        ("policy.engine_args.dtype=float16", "expected one of auto, bfloat16, float32"),
        ("trainer.training.seq_len=100", "is less than the 544 tokens"),
        ("group_size=four", "group_size = 'four' must be a whole number"),
        ("group_size=0", "group_size = 0 must be a whole number of 2 or more"),
        ("max_res_tokens=0", "max_res_tokens = 0 must be a whole number of 1 or more"),
        ("rollout_threads=-1", "rollout_threads = -1 must be a whole number of 1 or more"),
        ("actors.trainer.procs=0", "actors.trainer.procs = 0 must be a whole number of 1"),
        ("trainer.lr_scheduler.min_lr_factor=low", "min_lr_factor = 'low' must be a number"),
        ("trainer.optimizer.lr=-1", "optimizer.lr = -1 must be a number above 0, at most 1"),
        ("trainer.optimizer.lr=nan", "trainer.optimizer.lr = 'nan' must be a number above 0"),
        ("trainer.optimizer.beta2=1", "beta2 = 1 must be a number of 0 or more, below 1"),
        ("trainer.training.steps=0", "steps = 0 must be a whole number of 1 or more, or -1"),
        ("trainer.optimizer.weight_decay=1e6", "weight_decay = 1e+06 times trainer.optimizer.lr"),
        ("trainer.lr_scheduler.decay_type=sqrt", "expected one of constant, linear, cosine"),
        ("trainer.compile.enable=1", "trainer.compile.enable = 1 must be true or false"),
        ("policy.sampling_params.temperature=3", "sampling_params.temperature = 3, but vLLM"),
        ("policy.engine_args.max_model_len=99", "max_model_len = 99 is less than the 544 tokens"),
        ("max_seq_len=32", "max_res_tokens = 32 leaves no room for a prompt in max_seq_len = 32"),
        ("model=5", "model = 5 must be a text: a folder, or the id of a model"),
        ("blackjack_env.server_url=5", "blackjack_env.server_url = 5 must be a text"),
        ("policy=5", "policy must be a section with keys of its own, got a value"),
        ("model=${modell}", "refers to a key that is not there"),
        ("model=${model}", "refers to itself"),
    ],
)
def test_what_no_run_does_is_refused_with_key_and_value(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        mapped(override)
    assert told in str(refused.value)


NUMBERS = [
    key
    for key, kind in KINDS.items()
    if kind is not bool and (get_args(kind) or (str,))[0] in (int, float)
]


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_is_taken_or_refused_by_the_key_that_was_typed(key: str, has_gpu: bool) -> None:
    refused = False
    for value in (-2, -1, -0.5, 0, 1e-9, 0.5, 1, 1.5, 2, 3.5, 8, 70_000, 2**40, 1e30, True, "abc"):
        try:
            run_of(f"{key}={json.dumps(value)}", has_gpu=has_gpu)
        except ConfigError as error:
            refused = True
            assert "is not a valid run" not in str(error), (value, str(error))
            assert key.rpartition(".")[2] in str(error), (value, str(error))
    assert refused or not has_gpu


def test_a_program_may_give_paths_and_numpys_numbers(tmp_path: Path) -> None:
    config = tutorial_config()
    config["group_size"], config["trainer"]["optimizer"]["lr"] = np.int64(8), np.float32(0.5)
    config["trainer"]["optimizer"]["weight_decay"] = np.float64(0.25)
    config["model"] = tmp_path
    run = run_config_from(run_tree(load_forge_config(config), name="x", has_gpu=False).tree)
    assert (run.rollout.group_size, run.learner.learning_rate) == (8, 0.5)
    assert run.model.model_dump()["path"] == str(tmp_path)


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected the path of a YAML file, .*, got 5"):
        load_forge_config(5)  # type: ignore[arg-type]


def test_checkpoints_are_written_as_the_file_says() -> None:
    unused = mapped().unused
    for name in ("enable", "initial_load_in_hf", "last_save_in_hf"):
        assert f"trainer.checkpoint.{name}" not in unused
    assert (
        "trainer.checkpoint.last_save_in_hf"
        in mapped("trainer.checkpoint.last_save_in_hf=false").unused
    )
    off = run_of("trainer.checkpoint.enable=false").training
    assert off.checkpoint_every_steps > off.num_steps
    assert run_of("trainer.checkpoint.keep_latest_k=0").training.keep_checkpoints > 1000
    with pytest.raises(ConfigError, match=r"enable = 'maybe' must be true or false"):
        mapped("trainer.checkpoint.enable=maybe")


def test_more_ranks_and_engines_are_asked_for_as_there() -> None:
    run = run_of(
        "trainer.parallelism.data_parallel_shard_degree=-1",
        "actors.trainer.procs=2",
        "replay_buffer.dp_size=2",
        "services.policy.num_replicas=3",
        "policy.engine_args.tensor_parallel_size=2",
    )
    assert (run.learner.num_ranks, run.rollout.num_workers) == (2, 3)
    assert run.training.groups_per_step == 4
    assert (
        run.generator.model_dump()["tensor_parallel_size"],
        run.rollout.num_gpus_per_worker,
    ) == (
        2,
        2,
    )


def test_the_section_ludus_stands_over_the_rest() -> None:
    run = run_of("model=tiny", "ludus.model.width=64", "ludus.algorithm.kl_coef=0.5")
    assert run.model.model_dump()["width"] == 64
    assert run.algorithm.kl_coef == 0.5
    local = run_of("ludus.environment.kind=local", "ludus.environment.package=math_env")
    assert local.environment.model_dump()["package"] == "math_env"


def test_a_file_without_a_server_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"blackjack_env\.server_url is not set"):
        mapped("blackjack_env.server_url=null")


def test_an_engine_that_is_chosen_keeps_what_the_file_says_of_it() -> None:
    said = ("policy.engine_args.max_num_seqs=7", 'ludus.generator.kind="vllm"')
    assert run_of(*said, has_gpu=False).generator.model_dump()["max_num_seqs"] == 7
    chosen = run_of('ludus.generator.kind="transformers"', has_gpu=True)
    assert chosen.generator.kind == "transformers"


def test_a_section_of_which_the_name_alone_is_left_says_nothing() -> None:
    config = tutorial_config()
    config["ref_model"] = config["metric_logging"] = config["ludus"] = None
    mapped_without = run_tree(load_forge_config(config), name="blackjack", has_gpu=True)
    assert mapped_without.tree["metrics"] == {}
    assert "ref_model" not in mapped_without.unused


def test_a_momentum_of_zero_is_one() -> None:
    assert run_of("trainer.optimizer.beta1=0.0").learner.betas == (0.0, 0.95)


def test_the_older_files_keys_are_read_too() -> None:
    config = tutorial_config()
    config["policy"] = {
        "engine_config": config["policy"]["engine_args"],
        "sampling_config": config["policy"]["sampling_params"],
    }
    tree = run_tree(load_forge_config(config), name="blackjack", has_gpu=True).tree
    assert tree == mapped().tree


def test_keys_are_attributes_and_references_follow_what_is_set() -> None:
    config = load_forge_config(tutorial_config())
    config.blackjack_env.server_url = "http://localhost:8005"
    config.model = "tiny"
    assert config.get("policy", {}).engine_args.model == "${model}"
    run = run_config_from(run_tree(config, name="x", has_gpu=False).tree)
    assert run.environment.model_dump()["address"] == "http://localhost:8005"
    assert run.model.kind == "tiny"
    with pytest.raises(AttributeError, match=r"no key 'server'; it has \['model', 'server_url'\]"):
        _ = config.blackjack_env.server


def test_a_variable_is_looked_up_where_its_key_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHO", raising=False)
    monkeypatch.delenv("USER", raising=False)
    mapped()  # metric_logging.wandb.group names USER, and means nothing here
    project = "metric_logging.wandb.project=of-${oc.env:WHO}"
    with pytest.raises(ConfigError, match="the environment variable WHO is not set"):
        mapped(project)
    monkeypatch.setenv("WHO", "me")
    assert mapped(project).tree["metrics"]["wandb"]["project"] == "of-me"


def test_overrides_leave_the_callers_mapping_alone() -> None:
    config = tutorial_config()
    load_forge_config(config, ["policy.sampling_params.temperature=0.5"])
    assert config == tutorial_config()


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFoundError, match=r"no configuration at 'nowhere\.yaml'"):
        load_forge_config("nowhere.yaml")


def test_all_keys_of_the_tutorial_are_known() -> None:
    assert {key for key, _ in leaves(tutorial_config())} <= known_keys()
