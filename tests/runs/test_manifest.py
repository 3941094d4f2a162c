"""The RayJob of a run is built from a run configuration and a release."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from ludus.proto.config import (
    FolderWeightStore,
    LanguageModelRun,
    RemoteEnvironment,
    S3WeightStore,
    load_run_config,
)
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.services.runs.cluster_checks import find_broken_rules
from ludus.services.runs.manifest import adapt_to_release, get_worker_groups, make_manifests
from ludus.services.runs.platform import choose_release, parse_release, read_release_file
from tests.charts.rendering import ValueSet, template
from tests.charts.schemas import problems
from tests.runs.release import (
    NAMESPACE,
    Json,
    build_manifests,
    make_config_map,
    make_ray_job_template,
    make_release,
    make_run_config,
)

ROOT = Path(__file__).parents[2]
VERSION = "1.37"


def get_group_sizes(job: Json) -> dict[str, tuple[int, int, int]]:
    return {
        worker_group["groupName"]: (
            worker_group["replicas"],
            worker_group["minReplicas"],
            worker_group["maxReplicas"],
        )
        for worker_group in get_worker_groups(job)
    }


def test_the_run_name_replaces_every_placeholder() -> None:
    run_manifests = build_manifests()
    assert run_manifests.job["metadata"]["name"] == "demo"
    assert run_manifests.job["metadata"]["namespace"] == NAMESPACE
    assert run_manifests.job["spec"]["metadata"] == {"run_id": "demo"}
    assert run_manifests.config_map["metadata"]["name"] == "demo-config"
    text = yaml.dump(run_manifests.job, Dumper=yaml.CSafeDumper)
    assert "RUN" not in text.replace("LUDUS_", "")
    assert text.count("name: demo-config") == 3
    for manifest in (run_manifests.job, run_manifests.config_map):
        assert manifest["metadata"]["labels"]["ludus.dev/run"] == "demo"
    assert list(find_broken_rules(run_manifests)) == []


def test_trainer_reads_the_run_with_cluster_paths() -> None:
    run_manifests = build_manifests()
    parsed_run = LanguageModelRun.model_validate_json(run_manifests.config_map["data"]["run.json"])
    assert parsed_run == run_manifests.run
    environment = parsed_run.environments["blackjack"]
    assert isinstance(environment, RemoteEnvironment)
    assert environment.address == "grpc://ludus-gateway:18000/blackjack"
    assert (parsed_run.output_dir, parsed_run.weights) == ("/runs", FolderWeightStore())
    assert parsed_run.training == make_run_config().training
    readapted_run = make_manifests(parsed_run, make_release(environments={})).run
    assert readapted_run == parsed_run  # a resumed run keeps its locations


def test_environment_settings_of_a_run_are_kept() -> None:
    config = load_run_config(ROOT / "examples/blackjack/tiny.toml")
    adapted_run = adapt_to_release(config, make_release().platform, {})
    local_environment, remote_environment = config.environment, adapted_run.environment
    assert isinstance(remote_environment, RemoteEnvironment)
    assert (remote_environment.policies, remote_environment.baselines) == (
        local_environment.policies,
        local_environment.baselines,
    )
    assert (remote_environment.policy_chart, remote_environment.rewards) == (
        local_environment.policy_chart,
        local_environment.rewards,
    )


def test_weights_use_the_store_of_the_release_and_interval_of_the_run() -> None:
    bucket = {"kind": "s3", "bucket": "weights", "endpoint": "http://store:9000", "prefix": "a"}
    platform = make_release(weights=bucket).platform
    adapted_run = adapt_to_release(
        make_run_config(weights={"kind": "ray", "full_every": 4}), platform, {}
    )
    assert adapted_run.weights == S3WeightStore(**{**bucket, "full_every": 4})
    own_store = {"kind": "s3", "bucket": "own-bucket"}
    assert (
        adapt_to_release(make_run_config(weights=own_store), platform, {}).weights.bucket
        == "own-bucket"
    )


def test_driver_serves_metrics_on_the_release_port_unless_the_run_sets_it() -> None:
    platform = make_release(metrics_port=9100).platform
    sink = adapt_to_release(make_run_config(), platform, {}).metrics.prometheus
    assert sink is not None and (sink.port, sink.host) == (9100, "0.0.0.0")
    run = make_run_config(metrics={"prometheus": {"port": 7}})
    assert adapt_to_release(run, platform, {}).metrics.prometheus.port == 7


@pytest.mark.parametrize(
    ("environment", "choices", "expected"),
    [
        ({"options": {"game": "catch"}}, {}, "does not serve 'catch'; it serves blackjack"),
        ({"options": {"game": "catch"}}, {"catch": "blackjack"}, '{"game": "catch"}, but'),
        ({"package": "math_env"}, {"math": "sums"}, "does not serve 'sums'"),
        ({}, {"black": "blackjack"}, "the run has no environment 'black'; it has openspiel"),
    ],
)
def test_unserved_environment_is_reported_with_a_remedy(
    environment: Json, choices: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_manifests(make_run_config(environment=environment), make_release(), choices)
    assert expected in str(error.value)


def test_environments_match_by_choice_or_by_package_and_options() -> None:
    served_environments = {
        "cards": {"address": "grpc://g/cards", "package": "openspiel_env", "options": {"a": 1}},
        "other": {"address": "grpc://g/other"},
    }
    environments = {
        "own": {"package": "openspiel_env", "options": {"a": 1}},
        "free": {"package": "math_env"},
        "away": {"kind": "remote", "address": "grpc://elsewhere:1"},
    }
    tree = {"name": "demo", "environments": environments}
    config = LanguageModelRun.model_validate(tree)
    adapted_run = adapt_to_release(
        config, make_release(environments=served_environments).platform, {"free": "other"}
    )
    assert [environment.address for environment in adapted_run.environments.values()] == [
        "grpc://g/cards",
        "grpc://g/other",
        "grpc://elsewhere:1",
    ]


def test_worker_groups_have_enough_pods_for_ranks_and_workers() -> None:
    run_manifests = build_manifests(
        learner={"num_ranks": 2}, rollout={"num_workers": 3, "min_workers": 2}
    )
    # KubeRay waits for all replicas, so optional workers are not included.
    assert get_group_sizes(run_manifests.job) == {"learner": (2, 2, 2), "rollout": (2, 2, 4)}
    run_manifests = build_manifests(rollout={"num_workers": 6})
    assert get_group_sizes(run_manifests.job)["rollout"] == (1, 1, 6)


def test_group_without_autoscaling_starts_with_all_pods() -> None:
    job = make_ray_job_template()
    job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] = False
    run_manifests = build_manifests(job, rollout={"num_workers": 3, "min_workers": 1})
    assert get_group_sizes(run_manifests.job)["rollout"] == (3, 3, 3)


def test_several_ranks_or_workers_can_share_a_pod() -> None:
    per_pod = {"learner": {"per_pod": 8}, "rollout": {"per_pod": 2}}
    run = make_run_config(learner={"num_ranks": 16}, rollout={"num_workers": 5, "min_workers": 3})
    run_manifests = make_manifests(run, make_release(**per_pod))
    assert get_group_sizes(run_manifests.job) == {"learner": (2, 2, 2), "rollout": (2, 2, 4)}


def test_the_driver_output_goes_to_the_container_log() -> None:
    entrypoint = build_manifests().job["spec"]["entrypoint"]
    command = shlex.split(entrypoint)
    assert command[:4] == ["bash", "-o", "pipefail", "-c"]
    assert "LUDUS_CONTROL_FILE=/etc/ludus/control.json python -m ludus.trainer" in command[4]
    assert command[4].endswith("--resume=auto 2>&1 | tee /proc/1/fd/1")


def test_command_line_queue_overrides_the_release_queue() -> None:
    run_manifests = make_manifests(make_run_config(), make_release(), queue="gpus")
    metadata = run_manifests.job["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert metadata["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"
    assert list(find_broken_rules(run_manifests)) == []


# Releases.


def test_release_is_selected_by_name_or_as_the_only_release() -> None:
    first_release, second_release = make_config_map(), make_config_map(release="second")
    assert choose_release([first_release], None, "here").platform.release == "ludus"
    assert (
        choose_release([first_release, second_release], "second", "here").platform.release
        == "second"
    )
    with pytest.raises(ConfigError, match="ludus, second; choose one with --release"):
        choose_release([first_release, second_release], None, "here")
    with pytest.raises(NotFoundError, match="did you mean 'second'"):
        choose_release([first_release, second_release], "secnd", "here")
    with pytest.raises(NotFoundError, match=r"no Ludus release in namespace 'x'; install one"):
        choose_release([], None, "namespace 'x'")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, "no key rayjob.yaml"),
        ({"rayjob.yaml": "kind: Pod", "platform.json": "{}"}, "platform.json: release: Field"),
        ({"rayjob.yaml": "kind: Pod"}, "no key platform.json"),
        ({"rayjob.yaml": "{", "platform.json": '{"release": "a", "namespace": "b"}'}, "rayjob"),
        (
            {"rayjob.yaml": "a: 1", "platform.json": '{"release": "a", "namespace": "b"}'},
            "not a RayJob",
        ),
    ],
)
def test_config_map_of_an_incompatible_version_is_refused(data: Json, expected: str) -> None:
    with pytest.raises(ConfigError, match="upgrade the release") as error:
        parse_release({"metadata": {"name": "ludus-runs"}, "data": data})
    assert expected in str(error.value)


def test_release_is_read_from_helm_template_output(tmp_path: Path) -> None:
    path = tmp_path / "rendered.yaml"
    service = {"kind": "Service", "metadata": {"name": "a", "labels": None}}
    path.write_text(yaml.safe_dump_all([service, None, make_config_map()]))
    assert read_release_file(path, None).platform.namespace == NAMESPACE
    with pytest.raises(NotFoundError, match="no release 'b'"):
        read_release_file(path, "b")
    with pytest.raises(ConfigError, match="cannot read"):
        read_release_file(tmp_path / "none", None)


# Comparison with the chart and with KubeRay's schema.


@pytest.mark.slow
@pytest.mark.parametrize("file", ["values-cpu.yaml", "values-gpu.yaml"])
def test_run_from_a_rendered_release_is_valid(file: str, tmp_path: Path) -> None:
    template_process = template(ValueSet("shipped", file=file))
    assert template_process.returncode == 0, template_process.stderr
    path = tmp_path / "rendered.yaml"
    path.write_text(template_process.stdout)
    chart_release = read_release_file(path, None)
    environment = chart_release.platform.environments["blackjack"]
    run = make_run_config(
        environment={"package": environment.package, "options": environment.options}
    )
    run_manifests = make_manifests(run, chart_release)
    assert list(find_broken_rules(run_manifests)) == []
    assert "RUN" not in yaml.safe_dump(run_manifests.job).replace("LUDUS_", "")


@pytest.mark.slow
@pytest.mark.parametrize("queue", [None, "gpus"])
def test_run_matches_the_kuberay_schema(queue: str | None) -> None:
    run_manifests = make_manifests(make_run_config(), make_release(), queue=queue)
    assert problems(run_manifests.job, VERSION) == []
    assert problems(run_manifests.config_map, VERSION) == []
    run_manifests.job["spec"]["backofLimit"] = 1
    assert problems(run_manifests.job, VERSION) != []
