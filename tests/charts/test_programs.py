"""The chart's configuration, arguments and permissions work with the real programs."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ludus.env.security.secret_files import SecretFile
from ludus.env.serving.application import add_server_arguments
from ludus.env.sessions.options import DEFAULT_PORT, ServerOptions, make_server_options
from ludus.env.transports.address import parse_address
from ludus.proto.config import LanguageModelRun
from ludus.services.gateway.config import GatewayConfig, KubernetesEnvironment, SandboxEnvironment
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.kubernetes.source import EndpointSliceSource
from tests.charts.rendering import Object, RenderedRelease, ValueSet, render
from tests.charts.value_sets import ALL_SETS, CPU_SET
from tests.env.polling import wait_until
from tests.gateway.cluster_objects import make_api_client
from tests.gateway.fake_kubernetes import FakeKubernetes

pytestmark = pytest.mark.slow
parametrize_value_sets = pytest.mark.parametrize(
    "value_set", ALL_SETS, ids=lambda value_set: value_set.name
)


def render_feature(name: str) -> RenderedRelease:
    """Render the value set with this name."""
    return render(next(value_set for value_set in ALL_SETS if value_set.name == name))


def read_gateway_config(release: RenderedRelease) -> GatewayConfig:
    """Read the configuration of the release's gateway."""
    return GatewayConfig.parse(tomllib.loads(release.gateway_toml))


def get_container(deployment: Object) -> dict[str, Any]:
    """Return the only container of a Deployment's pods."""
    (single_container,) = deployment["spec"]["template"]["spec"]["containers"]
    return single_container  # type: ignore[no-any-return]


def map_variables(container_spec: dict[str, Any]) -> dict[str, Any]:
    """Return the environment variables of a container by name."""
    return {item["name"]: item for item in container_spec["env"]}


def map_ports(container_spec: dict[str, Any]) -> dict[str, int]:
    """Return the ports of a container by name."""
    return {item["name"]: item["containerPort"] for item in container_spec["ports"]}


def list_secret_paths(pod_spec: dict[str, Any], container_spec: dict[str, Any]) -> set[Path]:
    """Return the paths at which a container has the files of the volume `secrets`."""
    (volume,) = [item for item in pod_spec["volumes"] if item["name"] == "secrets"]
    (mount,) = [item for item in container_spec["volumeMounts"] if item["name"] == "secrets"]
    return {Path(mount["mountPath"], item["path"]) for item in volume["secret"]["items"]}


@parametrize_value_sets
def test_gateway_configuration_matches_ports_variables_and_mounts(value_set: ValueSet) -> None:
    release = render(value_set)
    config, gateway = (
        read_gateway_config(release),
        get_container(release.find("Deployment", "-gateway")),
    )
    listening_ports = {"http": config.port, "grpc": config.grpc_port, "admin": config.admin_port}
    assert listening_ports == map_ports(gateway)
    mount_paths = [item["mountPath"] for item in gateway["volumeMounts"]]
    paths = [config.tenants_file, *((config.tls.cert, config.tls.key) if config.tls else ())]
    assert all(str(path.parent) in mount_paths for path in paths if path is not None)
    pod_spec = release.find("Deployment", "-gateway")["spec"]["template"]["spec"]
    secret_paths = {config.session_key_file, config.servers.token_file, config.token_file} - {None}
    assert secret_paths == list_secret_paths(pod_spec, gateway)
    assert (config.token_file is None) == (config.tenants_file is not None)
    assert pod_spec["terminationGracePeriodSeconds"] >= config.drain_grace_s + 10


@parametrize_value_sets
def test_gateway_configuration_refers_to_objects_of_the_release(value_set: ValueSet) -> None:
    release = render(value_set)
    services = {item["metadata"]["name"]: item for item in release.list_kind("Service")}
    leases = {item["metadata"]["name"] for item in release.list_kind("Lease")}
    pools = {item["metadata"]["name"] for item in release.list_kind("SandboxWarmPool")}
    for environment in read_gateway_config(release).environments.values():
        assert isinstance(environment, KubernetesEnvironment | SandboxEnvironment)
        assert environment.namespace == value_set.namespace
        if isinstance(environment, SandboxEnvironment):
            assert environment.warm_pool in pools
            continue
        service = services[environment.service]["spec"]
        assert service["clusterIP"] == "None"
        assert {item["name"] for item in service["ports"]} == {"http", "grpc"}
        is_autoscaled = bool(list_scalers(release, environment.service))
        assert environment.lease in leases if is_autoscaled else not environment.lease


def list_scalers(release: RenderedRelease, deployment: str) -> list[Object]:
    """Return the autoscalers of a Deployment."""
    kinds = ("HorizontalPodAutoscaler", "ScaledObject")
    scalers = [item for kind in kinds for item in release.list_kind(kind)]
    return [item for item in scalers if item["spec"]["scaleTargetRef"]["name"] == deployment]


def parse_server_options(
    container_spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, ServerOptions]:
    """Parse a container's arguments as `python -m ludus.env` does, with secrets in its files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("--options", default="{}")
    add_server_arguments(parser, DEFAULT_PORT)
    arguments = parser.parse_args([item.replace("$$(", "$(") for item in container_spec["args"]])
    monkeypatch.setattr(SecretFile, "read", lambda file: (f"{file.path.name}-{'s' * 32}",))
    monkeypatch.setenv("POD_UID", "0c4f7b5e-9a0e-4a53-8a52-6f6f6f6f6f6f")
    return arguments, make_server_options(vars(arguments), DEFAULT_PORT)


@parametrize_value_sets
def test_environment_server_accepts_the_rendered_arguments(
    value_set: ValueSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, metadata, spec in render(value_set).iterate_pods():
        name = metadata["labels"].get("ludus.dev/environment")
        if metadata["labels"]["app.kubernetes.io/component"] != "environment":
            continue
        (server,) = spec["containers"]
        arguments, options = parse_server_options(server, monkeypatch)
        listening_ports = {
            "http": options.port,
            "grpc": options.requested_grpc_port,
            "admin": options.admin_port,
        }
        assert listening_ports == map_ports(server)
        assert arguments.package
        assert name
        mount_paths = [item["mountPath"] for item in server["volumeMounts"]]
        for path in (options.token_file, options.server_key_file):
            assert path is not None
            assert str(path.parent) in mount_paths
        assert not options.list_exposed_secrets()
        id_variable = "LUDUS_SERVER_ID" if spec.get("restartPolicy") == "Never" else "POD_UID"
        server_variables = {id_variable, "HOME"}
        (sidecar,) = spec["initContainers"]
        assert map_variables(sidecar).keys() == {id_variable}
        assert server_variables <= map_variables(server).keys()
        # Configured variables belong to the environment and are passed to its workers.
        assert set(options.pass_env) == map_variables(server).keys() - server_variables
        assert spec["terminationGracePeriodSeconds"] >= options.drain_grace_s + 10


def test_options_are_passed_to_environments_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    release = render_feature("unusual-options")
    blackjack_container = get_container(release.find("Deployment", "-env-blackjack"))
    arguments, _ = parse_server_options(blackjack_container, monkeypatch)
    expected_options = release.value_set.values["environments"]["blackjack"]["options"]
    assert yaml.safe_load(arguments.options) == expected_options
    _, gym_options = parse_server_options(
        get_container(release.find("Deployment", "-env-gym")), monkeypatch
    )
    assert (gym_options.isolation, gym_options.num_workers, gym_options.num_threads) == (
        "pool",
        2,
        4,
    )
    assert (
        gym_options.step_timeout_s,
        gym_options.idle_timeout_s,
        gym_options.memory_limit_mb,
    ) == (2.5, 60, 512)
    _, shell_options = parse_server_options(
        get_container(release.find("Deployment", "-env-shell")), monkeypatch
    )
    assert (shell_options.isolation, shell_options.cpu_limit_s) == ("process", 60)
    assert (gym_options.require_sandbox, gym_options.no_network) == (True, True)
    assert (gym_options.deterministic, shell_options.deterministic) == (False, True)


def test_zero_and_false_values_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = render_feature("zero-values").find("Deployment", "-env-blackjack")
    assert deployment["spec"]["replicas"] == 0
    _, options = parse_server_options(get_container(deployment), monkeypatch)
    assert (options.step_timeout_s, options.drain_grace_s) == (0, 0)
    sessions = read_gateway_config(render_feature("zero-values")).sessions
    assert (sessions.queue_size, sessions.linger_s, sessions.queue_timeout_s) == (0, 0, 0)
    template = render_feature("false-values").find("Deployment", "-env-blackjack")["spec"][
        "template"
    ]
    assert template["metadata"]["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"
    }


def test_changed_configuration_restarts_the_gateways() -> None:
    def read_checksum(release: RenderedRelease) -> str:
        template = release.find("Deployment", "-gateway")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert read_checksum(render_feature("minimal")) != read_checksum(render_feature("zero-values"))
    assert read_checksum(render_feature("minimal")) == read_checksum(render_feature("store"))


async def test_a_gateway_runs_with_the_chart_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check readiness, and that the gateway's requests need only the permissions of its Role."""
    release = render_feature("keda-from-one")
    monkeypatch.setattr(SecretFile, "read", lambda file: ("0123456789abcdef" * 2,))
    listen_settings = {"host": "127.0.0.1", "port": 0, "grpc_port": 0, "admin_port": 0}
    config = GatewayConfig.parse(tomllib.loads(release.gateway_toml) | listen_settings)
    async with FakeKubernetes() as cluster:
        for lease in release.list_kind("Lease"):
            metadata = {**lease["metadata"], "namespace": release.value_set.namespace}
            cluster.put({**lease, "metadata": metadata})
        (name, environment), *_ = config.environments.items()
        assert isinstance(environment, KubernetesEnvironment)
        source = EndpointSliceSource(make_api_client(cluster), environment, dict)
        async with Gateway(config, {name: source}) as gateway, httpx.AsyncClient() as http:
            response = await http.get(f"{gateway.admin_address}/readyz")
            assert response.status_code == 200
            await wait_until(lambda: cluster.num_requests("update", "leases") > 0)
        rules = release.find("Role")["rules"]
        denied_requests = [
            request
            for request in cluster.requests
            if not any(_allows(rule, request) for rule in rules)
        ]
        assert denied_requests == []


def _allows(rule: dict[str, Any], request: Any) -> bool:
    group = request.target.api_version.rpartition("/")[0]
    allowed_names = rule.get("resourceNames")
    return (
        group in rule["apiGroups"]
        and request.target.plural in rule["resources"]
        and request.verb in rule["verbs"]
        and request.target.namespace == CPU_SET.namespace
        and (allowed_names is None or request.target.name in allowed_names)
    )


@parametrize_value_sets
def test_clients_accept_the_rendered_environment_addresses(value_set: ValueSet) -> None:
    release = render(value_set)
    platform = release.platform
    services = {item["metadata"]["name"]: item for item in release.list_kind("Service")}
    assert platform["environments"].keys() == value_set.all_values["environments"].keys()
    for name, environment in platform["environments"].items():
        address = parse_address(environment["address"])
        assert address.environment_name == name
        host, _, port = address.authority.partition(":")
        service, namespace, *_ = host.split(".")
        assert namespace == value_set.namespace
        assert int(port) in [item["port"] for item in services[service]["spec"]["ports"]]
        assert parse_address(environment["http"]).uses_tls == address.uses_tls


@parametrize_value_sets
def test_a_run_can_be_configured_from_the_platform_description(value_set: ValueSet) -> None:
    platform = render(value_set).platform
    environments = {
        name: {"kind": "remote", "address": item["address"]}
        for name, item in platform["environments"].items()
    } or {"game": {"kind": "local"}}
    LanguageModelRun.model_validate(
        {
            "name": "run",
            "environments": environments,
            "output_dir": platform["output_dir"],
            "weights": platform["weights"],
        }
    )


@parametrize_value_sets
def test_ray_job_has_placeholders_for_submit(value_set: ValueSet) -> None:
    text = render(value_set).ray_job_text
    lines = [line.strip() for line in text.splitlines() if "RUN" in line.replace("RUNTIME", "")]
    assert sorted(set(lines)) == [
        "configMap: {name: RUN-config}",
        "metadata: {run_id: RUN}",
        "name: RUN",
    ]
    assert lines.count("configMap: {name: RUN-config}") == 3


@parametrize_value_sets
def test_ray_clusters_satisfy_the_rules_of_the_operator(value_set: ValueSet) -> None:
    release = render(value_set)
    job_spec = release.ray_job["spec"]
    assert job_spec["submissionMode"] == "HTTPMode"
    assert job_spec["shutdownAfterJobFinishes"] is True
    assert "deletionStrategy" not in job_spec
    assert not {"entrypointNumCpus", "entrypointNumGpus", "clusterSelector"} & job_spec.keys()
    clusters = [item["spec"] for item in release.list_kind("RayCluster")]
    for cluster in [job_spec["rayClusterSpec"], *clusters]:
        groups = cluster["workerGroupSpecs"]
        is_scaled = cluster["enableInTreeAutoscaling"]
        for group in (cluster["headGroupSpec"], *groups):
            pod_spec = group["template"]["spec"]
            assert pod_spec["containers"][0]["name"] in ("ray-head", "ray-worker")
            assert not is_scaled or pod_spec.get("restartPolicy") == "Never"
            assert "resources" not in group
            assert yaml.safe_load(group["rayStartParams"]["resources"]).startswith("{")
        learner, rollout = groups
        assert learner["minReplicas"] == learner["maxReplicas"]
        assert rollout["minReplicas"] <= rollout["maxReplicas"] < 2**31 - 1
        assert is_scaled or "idleTimeoutSeconds" not in rollout
    for cluster in clusters:
        groups_with_replicas = [item for item in cluster["workerGroupSpecs"] if "replicas" in item]
        assert bool(groups_with_replicas) != cluster["enableInTreeAutoscaling"]


def test_the_ray_job_has_the_labels_for_kueue() -> None:
    elastic_job, fixed_job = (
        render_feature("queue").ray_job,
        render_feature("queue-of-fixed-size").ray_job,
    )
    assert elastic_job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "games"
    assert elastic_job["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert fixed_job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "games"
    assert "annotations" not in fixed_job["metadata"]
    assert render_feature("queue").platform["queue"] == "games"
    assert render_feature("minimal").platform["queue"] is None


def test_the_cpu_values_fit_on_two_cores() -> None:
    release = render(CPU_SET)
    total_cpus = 0.0
    for deployment in release.list_kind("Deployment"):
        cpu_request = get_container(deployment)["resources"]["requests"]["cpu"]
        total_cpus += deployment["spec"]["replicas"] * int(cpu_request.removesuffix("m")) / 1000
    cluster = release.ray_job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        cpu_request = group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        total_cpus += group.get("replicas", 1) * int(cpu_request.removesuffix("m")) / 1000
    assert total_cpus <= 1.0  # The operators need the other core.
