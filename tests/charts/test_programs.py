"""What the chart hands to programs is what they take: configuration, arguments, rights."""

from __future__ import annotations

import argparse
import tomllib
from typing import Any

import httpx
import pytest
import yaml

from ludus.env.serving.application import add_server_arguments
from ludus.env.serving.options import DEFAULT_PORT, ServerOptions, make_server_options
from ludus.env.transports.address import parse_address
from ludus.proto.config import LanguageModelRun
from ludus.services.gateway.config import GatewayConfig, KubernetesEnvironment, SandboxEnvironment
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.kubernetes.cluster import ClusterSource
from tests.charts.rendering import Object, Rendered, ValueSet, rendered
from tests.charts.value_sets import ALL, CPU
from tests.env.polling import eventually
from tests.gateway.cluster_objects import make_api_client
from tests.gateway.fake_kubernetes import FakeKubernetes

pytestmark = pytest.mark.slow
every_set = pytest.mark.parametrize("chosen", ALL, ids=lambda one: one.name)


def feature(name: str) -> Rendered:
    """The release of one of the value sets."""
    return rendered(next(one for one in ALL if one.name == name))


def gateway_config(release: Rendered) -> GatewayConfig:
    """What a gateway of the release reads."""
    return GatewayConfig.parse(tomllib.loads(release.gateway_toml))


def container(found: Object) -> dict[str, Any]:
    """The one container of a Deployment's pods."""
    (only,) = found["spec"]["template"]["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def variables(of: dict[str, Any]) -> dict[str, Any]:
    """The environment variables of a container, by name."""
    return {one["name"]: one for one in of["env"]}


def ports(of: dict[str, Any]) -> dict[str, int]:
    """The ports of a container, by name."""
    return {one["name"]: one["containerPort"] for one in of["ports"]}


@every_set
def test_the_gateway_can_read_its_configuration(chosen: ValueSet) -> None:
    release = rendered(chosen)
    config, gateway = gateway_config(release), container(release.one("Deployment", "-gateway"))
    listening = {"http": config.port, "grpc": config.grpc_port, "admin": config.admin_port}
    assert listening == ports(gateway)
    named = {config.session_key_env, config.servers.token_env}
    if config.tenants_file is None:
        named.add(config.token_env)
    assert named <= variables(gateway).keys()
    mounted = [one["mountPath"] for one in gateway["volumeMounts"]]
    files = [config.tenants_file, *((config.tls.cert, config.tls.key) if config.tls else ())]
    assert all(str(one.parent) in mounted for one in files if one is not None)
    grace = release.one("Deployment", "-gateway")["spec"]["template"]["spec"]
    assert grace["terminationGracePeriodSeconds"] >= config.drain_grace_s + 10


@every_set
def test_the_gateway_finds_what_the_release_has(chosen: ValueSet) -> None:
    release = rendered(chosen)
    services = {one["metadata"]["name"]: one for one in release.of_kind("Service")}
    leases = {one["metadata"]["name"] for one in release.of_kind("Lease")}
    pools = {one["metadata"]["name"] for one in release.of_kind("SandboxWarmPool")}
    for environment in gateway_config(release).environments.values():
        assert isinstance(environment, KubernetesEnvironment | SandboxEnvironment)
        assert environment.namespace == chosen.namespace
        if isinstance(environment, SandboxEnvironment):
            assert environment.warm_pool in pools
            continue
        found = services[environment.service]["spec"]
        assert found["clusterIP"] == "None"
        assert {one["name"] for one in found["ports"]} == {"http", "grpc"}
        assert environment.lease in leases


def server_options(
    of: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, ServerOptions]:
    """What `python -m ludus.env` makes of a container's arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("--options", default="{}")
    add_server_arguments(parser, DEFAULT_PORT)
    given = parser.parse_args([one.replace("$$(", "$(") for one in of["args"]])
    monkeypatch.setenv("LUDUS_SESSION_KEY", "k" * 32)
    monkeypatch.setenv("LUDUS_ENV_TOKEN", "t" * 32)
    monkeypatch.setenv("POD_UID", "0c4f7b5e-9a0e-4a53-8a52-6f6f6f6f6f6f")
    return given, make_server_options(vars(given), DEFAULT_PORT)


@every_set
def test_an_environment_server_takes_its_arguments(
    chosen: ValueSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, metadata, spec in rendered(chosen).pods():
        name = metadata["labels"].get("ludus.dev/environment")
        if metadata["labels"]["app.kubernetes.io/component"] != "environment":
            continue
        (server,) = spec["containers"]
        given, options = server_options(server, monkeypatch)
        listening = {
            "http": options.port,
            "grpc": options.bound_grpc_port,
            "admin": options.admin_port,
        }
        assert listening == ports(server)
        assert given.package
        assert name
        own = {"LUDUS_SESSION_KEY", "LUDUS_ENV_TOKEN", "POD_UID", "HOME"}
        assert own <= variables(server).keys()
        # Those that somebody has chosen are the environment's, and reach its workers.
        assert set(options.pass_env) == variables(server).keys() - own
        assert spec["terminationGracePeriodSeconds"] >= options.drain_grace_s + 10


def test_options_reach_an_environment_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    release = feature("odd-options")
    blackjack = container(release.one("Deployment", "-env-blackjack"))
    given, _ = server_options(blackjack, monkeypatch)
    wanted = release.chosen.values["environments"]["blackjack"]["options"]
    assert yaml.safe_load(given.options) == wanted
    _, gym = server_options(container(release.one("Deployment", "-env-gym")), monkeypatch)
    assert (gym.isolation, gym.num_workers, gym.num_threads) == ("pool", 2, 4)
    assert (gym.step_timeout_s, gym.idle_timeout_s, gym.memory_limit_mb) == (2.5, 60, 512)
    _, shell = server_options(container(release.one("Deployment", "-env-shell")), monkeypatch)
    assert (shell.isolation, shell.cpu_limit_s) == ("process", 60)


def test_zero_and_false_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = feature("zeros").one("Deployment", "-env-blackjack")
    assert deployment["spec"]["replicas"] == 0
    _, options = server_options(container(deployment), monkeypatch)
    assert (options.step_timeout_s, options.drain_grace_s) == (0, 0)
    sessions = gateway_config(feature("zeros")).sessions
    assert (sessions.queue_size, sessions.linger_s, sessions.queue_timeout_s) == (0, 0, 0)
    template = feature("falses").one("Deployment", "-env-blackjack")["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"
    }


def test_a_changed_configuration_rolls_the_gateways() -> None:
    def checksum(release: Rendered) -> str:
        template = release.one("Deployment", "-gateway")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum(feature("least")) != checksum(feature("zeros"))
    assert checksum(feature("least")) == checksum(feature("store"))


async def test_a_gateway_runs_with_what_the_chart_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its configuration, and with no more rights than its Role has."""
    release = rendered(CPU)
    for name in variables(container(release.one("Deployment", "-gateway"))):
        monkeypatch.setenv(name, "0123456789abcdef" * 2)
    free = {"host": "127.0.0.1", "port": 0, "grpc_port": 0, "admin_port": 0}
    config = GatewayConfig.parse(tomllib.loads(release.gateway_toml) | free)
    async with FakeKubernetes() as cluster:
        for lease in release.of_kind("Lease"):
            metadata = {**lease["metadata"], "namespace": CPU.namespace}
            cluster.put({**lease, "metadata": metadata})
        (name, environment), *_ = config.environments.items()
        assert isinstance(environment, KubernetesEnvironment)
        source = ClusterSource(make_api_client(cluster), environment, dict)
        async with Gateway(config, {name: source}) as gateway, httpx.AsyncClient() as http:
            ready = await http.get(f"{gateway.admin_address}/readyz")
            assert ready.status_code == 200
            await eventually(lambda: cluster.num_requests("update", "leases") > 0)
        rules = release.one("Role")["rules"]
        refused = [one for one in cluster.requests if not any(_allows(rule, one) for rule in rules)]
        assert refused == []


def _allows(rule: dict[str, Any], request: Any) -> bool:
    group = request.target.api_version.rpartition("/")[0]
    names = rule.get("resourceNames")
    return (
        group in rule["apiGroups"]
        and request.target.plural in rule["resources"]
        and request.verb in rule["verbs"]
        and request.target.namespace == CPU.namespace
        and (names is None or request.target.name in names)
    )


@every_set
def test_runs_are_told_addresses_that_clients_take(chosen: ValueSet) -> None:
    release = rendered(chosen)
    platform = release.platform
    services = {one["metadata"]["name"]: one for one in release.of_kind("Service")}
    assert platform["environments"].keys() == chosen.all_values["environments"].keys()
    for name, environment in platform["environments"].items():
        address = parse_address(environment["address"])
        assert address.environment == name
        host, _, port = address.authority.partition(":")
        service, namespace, *_ = host.split(".")
        assert namespace == chosen.namespace
        assert int(port) in [one["port"] for one in services[service]["spec"]["ports"]]
        assert parse_address(environment["http"]).is_secure == address.is_secure


@every_set
def test_a_run_can_be_configured_with_what_the_platform_says(chosen: ValueSet) -> None:
    platform = rendered(chosen).platform
    environments = {
        name: {"kind": "remote", "address": one["address"]}
        for name, one in platform["environments"].items()
    } or {"here": {"kind": "local"}}
    LanguageModelRun.model_validate(
        {
            "name": "run",
            "environments": environments,
            "output_dir": platform["output_dir"],
            "weights": platform["weights"],
        }
    )


@every_set
def test_submit_finds_what_it_fills_in(chosen: ValueSet) -> None:
    text = rendered(chosen).ray_job_text
    lines = [line.strip() for line in text.splitlines() if "RUN" in line.replace("RUNTIME", "")]
    assert sorted(set(lines)) == [
        "configMap: {name: RUN-config}",
        "metadata: {run_id: RUN}",
        "name: RUN",
    ]
    assert lines.count("configMap: {name: RUN-config}") == 3


@every_set
def test_the_ray_cluster_keeps_the_rules_that_only_its_operator_knows(chosen: ValueSet) -> None:
    release = rendered(chosen)
    job = release.ray_job["spec"]
    assert job["submissionMode"] == "HTTPMode"
    assert job["shutdownAfterJobFinishes"] is True
    assert "deletionStrategy" not in job
    assert not {"entrypointNumCpus", "entrypointNumGpus", "clusterSelector"} & job.keys()
    clusters = [one["spec"] for one in release.of_kind("RayCluster")]
    for cluster in [job["rayClusterSpec"], *clusters]:
        groups = cluster["workerGroupSpecs"]
        is_scaled = cluster["enableInTreeAutoscaling"]
        for group in (cluster["headGroupSpec"], *groups):
            pod = group["template"]["spec"]
            assert pod["containers"][0]["name"] in ("ray-head", "ray-worker")
            assert not is_scaled or pod["restartPolicy"] == "Never"
            assert "resources" not in group
            assert yaml.safe_load(group["rayStartParams"]["resources"]).startswith("{")
        learner, rollout = groups
        assert learner["minReplicas"] == learner["maxReplicas"]
        assert rollout["minReplicas"] <= rollout["maxReplicas"] < 2**31 - 1
        assert is_scaled or "idleTimeoutSeconds" not in rollout
    for cluster in clusters:
        owned = [one for one in cluster["workerGroupSpecs"] if "replicas" in one]
        assert bool(owned) != cluster["enableInTreeAutoscaling"]


def test_kueue_is_told_what_it_has_to_know() -> None:
    scaled, fixed = feature("queue").ray_job, feature("queue-of-fixed-size").ray_job
    assert scaled["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "games"
    assert scaled["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert fixed["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "games"
    assert "annotations" not in fixed["metadata"]
    assert feature("queue").platform["queue"] == "games"
    assert feature("least").platform["queue"] is None


def test_the_cpu_values_fit_on_two_cores() -> None:
    release = rendered(CPU)
    total = 0.0
    for one in release.of_kind("Deployment"):
        requested = container(one)["resources"]["requests"]["cpu"]
        total += one["spec"]["replicas"] * int(requested.removesuffix("m")) / 1000
    cluster = release.ray_job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        requested = group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        total += group.get("replicas", 1) * int(requested.removesuffix("m")) / 1000
    assert total <= 1.0  # the rest is the operators'
