"""Secrets of a release: code of an environment finds none, and a renewed Secret takes effect."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.security.session_ids import derive_server_token, make_pod_server_id
from ludus.proto.errors import AuthenticationError, EnvError
from tests.cluster.gateway_client import GATEWAY_SERVICE, connect_client, open_tunnel
from tests.cluster.installed import (
    Release,
    create_namespace,
    create_object,
    find_skip_reason,
    kubectl,
)
from tests.env import code_env
from tests.env.secret_search import make_search_code, make_secret

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
ISOLATIONS = ("inline", "pool", "process")
"""Isolations of the chart. Each is the name of an environment with this isolation."""
SERVICE_ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io"
TENANT, TENANTS_SECRET = "team", "ludus-tenants"
MAX_RENEWAL_S = 60.0


def make_values() -> dict[str, Any]:
    """Return chart values with an environment of each isolation that runs the code of actions."""
    path = Path(code_env.__file__)
    serve_command = (
        f'printf %s "$PROGRAM" > {path.name}; exec dumb-init -- python -m ludus.env "$@"'
    )
    environments = {
        isolation: {
            "image": {"repository": "ludus/env-coding"},
            "command": ["sh", "-c", serve_command, "sh"],
            "package": f"{path.stem}:CodeEnv",
            "env": [{"name": "PROGRAM", "value": path.read_text(encoding="utf-8")}],
            "capacity": 4,
            "drainSeconds": 1,
            "server": {"isolation": isolation, "numWorkers": 1 if isolation == "pool" else None},
            "resources": {"requests": {"cpu": "20m", "memory": "128Mi"}},
        }
        for isolation in ISOLATIONS
    }
    return {
        "image": {"tag": "dev"},
        "auth": {"existingSecret": "ludus-auth"},
        "gateway": {
            "drainSeconds": 5,
            "resources": {"requests": {"cpu": "20m"}},
            "tenants": {"existingSecret": TENANTS_SECRET},
        },
        "environments": environments,
    }


def make_fleet_secrets() -> dict[str, str]:
    """Return new values for the keys of the Secret of a fleet."""
    return {key: make_secret() for key in ("session-key", "gateway-token", "environment-token")}


def make_tenants_file(token: str) -> dict[str, str]:
    """Return the data of the Secret with the tenants file of one tenant."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    text = f'[[tenants]]\nname = "{TENANT}"\ntoken_sha256 = "{digest}"\n'
    return {"tenants.toml": text}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    values_path = tmp_path_factory.mktemp("secrets") / "values.json"
    values_path.write_text(json.dumps(make_values()), encoding="utf-8")
    with create_namespace() as namespace:
        release = Release("ludus", namespace)
        fleet_secrets = make_fleet_secrets()
        patch_secret(release, "ludus-auth", fleet_secrets)
        tenants = make_tenants_file(fleet_secrets["gateway-token"])
        create_object("v1", "Secret", TENANTS_SECRET, namespace, stringData=tenants)
        release.upgrade([values_path])
        yield release


def patch_secret(release: Release, name: str, data: Mapping[str, str]) -> None:
    """Replace values of a Secret."""
    patch = json.dumps({"stringData": data})
    kubectl("-n", release.namespace, "patch", "secret", name, "--patch", patch)


def update_pods_now(release: Release) -> None:
    """Run the command of docs/security.md that makes each kubelet update its files at once."""
    selector = f"app.kubernetes.io/instance={release.name}"
    annotation = f"ludus.dev/renewed={time.time_ns()}"
    kubectl("-n", release.namespace, "annotate", "pods", "-l", selector, annotation, "--overwrite")


def read_secret(release: Release, key: str) -> str:
    """Return a value of the Secret of the fleet."""
    return base64.b64decode(release.get("secret", "ludus-auth")["data"][key]).decode()


# Search.


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_code_of_an_environment_finds_no_secret_of_the_fleet(
    release: Release, isolation: str
) -> None:
    async with connect_client(release, isolation) as client:
        session, _ = await client.open()
        report = (await session.step({"code": make_search_code((), ("/",))})).info
        assert report == {"result": []}
        code = f"import os\nresult = os.path.exists({SERVICE_ACCOUNT_FOLDER!r})"
        assert (await session.step({"code": code})).info == {"result": False}
        await session.close()


def test_the_search_finds_the_secrets_in_a_gateway(release: Release) -> None:
    code = f"{make_search_code((), ('/etc/ludus-secrets',))}\nprint(result)"
    output = exec_in_pod(release, list_pods(release, "gateway")[0], "python", "-c", code)
    assert "/etc/ludus-secrets/session-key" in output
    assert "/etc/ludus-secrets/environment-token" in output


def exec_in_pod(release: Release, pod: str, *command: str) -> str:
    """Run a command in the first container of a pod and return its output."""
    return kubectl("-n", release.namespace, "exec", pod, "--", *command)


def list_pods(release: Release, component: str) -> list[str]:
    """Return the names of a component's pods."""
    label = f"app.kubernetes.io/component={component}"
    return [pod["metadata"]["name"] for pod in release.get("pods", "-l", label)["items"]]


# Renewal.


async def test_a_renewed_tenant_token_takes_effect_without_restarts(release: Release) -> None:
    pods = describe_containers(release)
    old_token, new_token = read_secret(release, "gateway-token"), make_secret()
    with open_tunnel(release, GATEWAY_SERVICE) as port:
        address = f"grpc://127.0.0.1:{port}/inline"
        assert await is_accepted(address, old_token)
        start_s = time.monotonic()
        patch_secret(release, TENANTS_SECRET, make_tenants_file(new_token))
        patch_secret(release, "ludus-auth", {"gateway-token": new_token})
        update_pods_now(release)
        await report_duration(lambda: is_accepted(address, new_token), start_s, "tenant's token")
        assert not await is_accepted(address, old_token)
    assert describe_containers(release) == pods


async def test_renewed_secrets_of_the_fleet_take_effect_without_restarts(release: Release) -> None:
    pods = describe_containers(release)
    selector = "app.kubernetes.io/component=environment,ludus.dev/environment=inline"
    (server,) = release.get("pods", "-l", selector)["items"]
    server_id = make_pod_server_id(server["metadata"]["uid"])
    new_secrets = {key: make_secret() for key in ("session-key", "environment-token")}
    old_token = derive_server_token(read_secret(release, "environment-token"), server_id)
    new_token = derive_server_token(new_secrets["environment-token"], server_id)
    async with connect_client(release, "inline") as client:
        session, _ = await client.open()
        with open_tunnel(release, f"pod/{server['metadata']['name']}") as port:
            address = f"grpc://127.0.0.1:{port}"
            assert await is_accepted(address, old_token)
            start_s = time.monotonic()
            patch_secret(release, "ludus-auth", new_secrets)
            update_pods_now(release)
            await report_duration(
                lambda: is_accepted(address, new_token), start_s, "environment token"
            )
            assert not await is_accepted(address, old_token)

        async def can_play() -> bool:
            try:
                new_session, _ = await client.open()
                await new_session.step({"code": "result = 1"})
                await new_session.close()
            except EnvError:
                return False
            return True

        async def is_old_id_refused() -> bool:
            try:
                await session.step({"code": "result = 1"})
            except AuthenticationError:
                return True
            except EnvError:
                return False
            return False

        await report_duration(can_play, start_s, "sessions through a gateway")
        await report_duration(is_old_id_refused, start_s, "session key")
    assert describe_containers(release) == pods


def describe_containers(release: Release) -> set[tuple[str, str, int]]:
    """Return the uid, container and number of restarts of each container."""
    return {
        (pod["metadata"]["uid"], status["name"], status["restartCount"])
        for pod in release.get("pods")["items"]
        for kind in ("initContainerStatuses", "containerStatuses")
        for status in pod["status"].get(kind, ())
    }


async def is_accepted(address: str, token: str) -> bool:
    """Return True if the server or gateway accepts the token."""
    try:
        async with await AsyncEnvClient.connect(address, ConnectOptions(token=token)) as client:
            await client.describe()
    except AuthenticationError:
        return False
    return True


async def report_duration(
    condition: Callable[[], Awaitable[bool]], start_s: float, subject: str
) -> None:
    """Wait until the condition is true; print the time since `start_s`."""
    while not await condition():
        assert time.monotonic() - start_s < MAX_RENEWAL_S, f"the {subject} does not take effect"
        await asyncio.sleep(0.2)
    sys.stdout.write(f"\n{subject}: renewed after {time.monotonic() - start_s:.1f} s\n")
