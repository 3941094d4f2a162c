"""Mapping of Forge's configuration to a run configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from ludus.proto.config import LanguageModelRun, make_run_config
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.compat.checks import rename_in_errors
from ludus.trainer.compat.forge import load_forge_config
from ludus.trainer.compat.forge.keys import KNOWN_KEYS, TYPE_BY_KEY
from ludus.trainer.compat.forge.mapping import MappedConfig, map_config
from tests.forge.tutorial_config import tutorial_config


def map_tutorial(*overrides: str, has_gpu: bool = True) -> MappedConfig:
    config = load_forge_config(tutorial_config(), overrides)
    return map_config(config, name="blackjack", has_gpu=has_gpu)


def make_run(*overrides: str, has_gpu: bool = True) -> LanguageModelRun:
    mapped_config = map_tutorial(*overrides, has_gpu=has_gpu)
    with rename_in_errors(mapped_config.key_by_setting):
        run = make_run_config(mapped_config.sections)
    assert isinstance(run, LanguageModelRun)
    return run


def list_settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from list_settings(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def test_tutorial_configuration_is_mapped() -> None:
    run = make_run()
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


def test_run_without_gpu_uses_transformers_and_no_vllm_keys() -> None:
    assert make_run(has_gpu=False).generator.kind == "transformers"
    assert "policy.engine_args.enforce_eager" in map_tutorial(has_gpu=False).unused_keys
    assert "policy.engine_args.enforce_eager" not in map_tutorial().unused_keys


def test_unused_keys_are_listed() -> None:
    assert {
        "metric_logging.wandb.group",
        "metric_logging.console.reduce_across_ranks",
        "trainer.checkpoint.async_mode",
        "trainer.training.gc_freq",
        "services.ref_model.procs",
        "actors.compute_advantages.mesh_name",
    } <= set(map_tutorial().unused_keys)


NEW_VALUE_BY_KEY = {"trainer.training.seq_len": 100, "policy.sampling_params.n": 3}
"""New values for keys that `CHANGE_BY_TYPE` cannot change to a valid value."""
CHANGE_BY_TYPE = {
    bool: lambda value: not value,
    int: lambda value: value + 4000,
    float: lambda v: v / 2,
}


@pytest.mark.parametrize("key", [key for key, _ in list_settings(tutorial_config())])
def test_a_used_key_changes_the_run_or_is_refused(key: str) -> None:
    tutorial_mapping = map_tutorial()
    if key in tutorial_mapping.unused_keys:
        return
    value = dict(list_settings(tutorial_config()))[key]
    new_value = NEW_VALUE_BY_KEY.get(
        key, CHANGE_BY_TYPE.get(type(value), lambda _: "something-else")(value)
    )
    try:
        mapping = map_tutorial(f"{key}={str(new_value).lower()}")
        assert mapping.sections != tutorial_mapping.sections or key in mapping.unused_keys
    except ConfigError as error:
        assert key.rpartition(".")[2] in str(error)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("group_sizes=8", "group_sizes: unknown, did you mean 'group_size'?"),
        ("trainer.optimizer.learning_rate=1", "trainer.optimizer.learning_rate: unknown"),
        ("trainer.optimiser.lr=1", "trainer.optimiser.lr: unknown"),
        ("rollout.temperature=1", "Ludus fields belong in the `ludus` section"),
        ("local_batch_size=6", "local_batch_size = 6 on 1 ranks must be a multiple of group_size"),
        ("trainer.optimizer.name=Adam", "trainer.optimizer.name = 'Adam' must be AdamW"),
        ("trainer.activation_checkpoint.mode=half", "must be one of none, selective, full"),
        ("trainer.parallelism.tensor_parallel_degree=2", "data_parallel_shard_degree"),
        ("replay_buffer.max_policy_age=3", "these keys have the same meaning; make them equal"),
        ("replay_buffer.dp_size=2", "but the trainer has 1 data-parallel ranks"),
        ("policy.engine_args.model=other/model", "must start from the same model"),
        ("policy.sampling_params.n=3", "must be 1 or group_size = 4"),
        ("policy.engine_args.dtype=float32", "their log-probs are compared"),
        ("policy.engine_args.dtype=float16", "must be one of auto, bfloat16, float32"),
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
        ("trainer.lr_scheduler.decay_type=sqrt", "must be one of constant, linear, cosine"),
        ("trainer.compile.enable=1", "trainer.compile.enable = 1 must be True or False"),
        ("policy.sampling_params.temperature=3", "params.temperature = 3 is more than vLLM's"),
        (
            "policy.engine_args.max_model_len=99",
            "max_model_len = 99 is less than max_req_tokens + max_res_tokens = 544",
        ),
        ("max_seq_len=32", "max_res_tokens = 32 leaves no room for a prompt in max_seq_len = 32"),
        ("model=5", "model = 5 must be a text: a folder, or a Hugging Face model id"),
        ("blackjack_env.server_url=5", "blackjack_env.server_url = 5 must be a text"),
        ("policy=5", "policy: must be a section with keys"),
        ("model=${modell}", "refers to a key that does not exist"),
        ("model=${model}", "refers to itself"),
    ],
)
def test_invalid_values_are_refused_with_key_and_value(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_run(override)
    assert message in str(error.value)


def test_error_in_the_ludus_section_contains_the_section_name() -> None:
    with pytest.raises(ConfigError, match=r"ludus\.rollout\.temperature = 3 is more than vLLM's"):
        make_run("ludus.rollout.temperature=3")


RUN_SETTING_PATTERN = re.compile(
    r"(?<![\w.])(rollout|generator|learner|training|environments?)\.[\w.]+ ="
)
"""Pattern of the run settings that error messages must not contain."""
NUMBER_KEYS = [
    key
    for key, value_type in TYPE_BY_KEY.items()
    if value_type is not bool and (get_args(value_type) or (str,))[0] in (int, float)
]


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("key", NUMBER_KEYS)
def test_error_of_an_invalid_number_contains_the_key(key: str, has_gpu: bool) -> None:
    is_refused = False
    for value in (-2, -1, -0.5, 0, 1e-9, 0.5, 1, 1.5, 2, 3.5, 8, 70_000, 2**40, 1e30, True, "abc"):
        try:
            make_run(f"{key}={json.dumps(value)}", has_gpu=has_gpu)
        except ConfigError as error:
            is_refused = True
            assert not RUN_SETTING_PATTERN.search(str(error)), (value, str(error))
            assert key.rpartition(".")[2] in str(error), (value, str(error))
    assert is_refused or not has_gpu


def test_paths_and_numpy_numbers_are_accepted(tmp_path: Path) -> None:
    config = tutorial_config()
    config["group_size"], config["trainer"]["optimizer"]["lr"] = np.int64(8), np.float32(0.5)
    config["trainer"]["optimizer"]["weight_decay"] = np.float64(0.25)
    config["model"] = tmp_path
    run = make_run_config(map_config(load_forge_config(config), name="x", has_gpu=False).sections)
    assert (run.rollout.group_size, run.learner.learning_rate) == (8, 0.5)
    assert run.model.model_dump()["path"] == str(tmp_path)


def test_non_configuration_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be the path of a YAML file .*, got 5"):
        load_forge_config(5)  # type: ignore[arg-type]


def test_checkpoint_keys_are_mapped() -> None:
    unused_keys = map_tutorial().unused_keys
    for name in ("enable", "initial_load_in_hf", "last_save_in_hf"):
        assert f"trainer.checkpoint.{name}" not in unused_keys
    assert (
        "trainer.checkpoint.last_save_in_hf"
        in map_tutorial("trainer.checkpoint.last_save_in_hf=false").unused_keys
    )
    training_config = make_run("trainer.checkpoint.enable=false").training
    assert training_config.checkpoint_every_steps > training_config.num_steps
    assert make_run("trainer.checkpoint.keep_latest_k=0").training.keep_checkpoints > 1000
    with pytest.raises(ConfigError, match=r"enable = 'maybe' must be True or False"):
        map_tutorial("trainer.checkpoint.enable=maybe")


def test_rank_and_engine_counts_are_mapped() -> None:
    run = make_run(
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


def test_the_ludus_section_overrides_the_other_keys() -> None:
    run = make_run("model=tiny", "ludus.model.width=64", "ludus.algorithm.kl_coef=0.5")
    assert run.model.model_dump()["width"] == 64
    assert run.algorithm.kl_coef == 0.5
    run_config = make_run("ludus.environment.kind=local", "ludus.environment.package=math_env")
    assert run_config.environment.model_dump()["package"] == "math_env"


def test_a_file_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"blackjack_env\.server_url is required"):
        map_tutorial("blackjack_env.server_url=null")


def test_explicit_engine_overrides_the_gpu_default() -> None:
    overrides = ("policy.engine_args.max_num_seqs=7", 'ludus.generator.kind="vllm"')
    assert make_run(*overrides, has_gpu=False).generator.model_dump()["max_num_seqs"] == 7
    run = make_run('ludus.generator.kind="transformers"', has_gpu=True)
    assert run.generator.kind == "transformers"


def test_an_empty_section_has_no_effect() -> None:
    config = tutorial_config()
    config["ref_model"] = config["metric_logging"] = config["ludus"] = None
    mapping = map_config(load_forge_config(config), name="blackjack", has_gpu=True)
    assert mapping.sections["metrics"] == {}
    assert "ref_model" not in mapping.unused_keys


def test_a_beta1_of_zero_is_valid() -> None:
    assert make_run("trainer.optimizer.beta1=0.0").learner.betas == (0.0, 0.95)


def test_legacy_keys_are_mapped() -> None:
    config = tutorial_config()
    config["policy"] = {
        "engine_config": config["policy"]["engine_args"],
        "sampling_config": config["policy"]["sampling_params"],
    }
    mapped_sections = map_config(load_forge_config(config), name="blackjack", has_gpu=True).sections
    assert mapped_sections == map_tutorial().sections


def test_keys_are_attributes_and_references_resolve_to_new_values() -> None:
    config = load_forge_config(tutorial_config())
    config.blackjack_env.server_url = "http://localhost:8005"
    config.model = "tiny"
    assert config.get("policy", {}).engine_args.model == "${model}"
    run = make_run_config(map_config(config, name="x", has_gpu=False).sections)
    assert run.environment.model_dump()["address"] == "http://localhost:8005"
    assert run.model.kind == "tiny"
    with pytest.raises(AttributeError, match=r"no key 'server'; it has \['model', 'server_url'\]"):
        _ = config.blackjack_env.server


def test_environment_variable_is_read_only_if_the_key_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WHO", raising=False)
    monkeypatch.delenv("USER", raising=False)
    map_tutorial()  # metric_logging.wandb.group refers to USER and is unused
    project = "metric_logging.wandb.project=of-${oc.env:WHO}"
    with pytest.raises(ConfigError, match="the environment variable WHO is not set"):
        map_tutorial(project)
    monkeypatch.setenv("WHO", "me")
    assert map_tutorial(project).sections["metrics"]["wandb"]["project"] == "of-me"


def test_overrides_do_not_modify_the_input_mapping() -> None:
    config = tutorial_config()
    load_forge_config(config, ["policy.sampling_params.temperature=0.5"])
    assert config == tutorial_config()


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(NotFoundError, match=r"there is no file 'nowhere\.yaml'"):
        load_forge_config("nowhere.yaml")


def test_all_keys_of_the_tutorial_are_known() -> None:
    assert {key for key, _ in list_settings(tutorial_config())} <= KNOWN_KEYS
