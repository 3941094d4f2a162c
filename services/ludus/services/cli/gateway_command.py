"""`ludus gateway`: serves environments on one address, from servers here or elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.proto.errors import ConfigError
from ludus.services.cli.console import results_console, say
from ludus.services.cli.options import parse_options

if TYPE_CHECKING:
    from ludus.services.gateway.gateway import Gateway

_EXAMPLE = "for example --env blackjack=openspiel_env or --env cards=grpc://10.0.0.7:18000"


ConfigFile = Annotated[
    Path | None, typer.Option(help="TOML file; options given beside it have precedence.")
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=TARGET",
        help="A package or other target to run here, or grpc:// addresses with commas between;"
        " may be repeated.",
    ),
]
TargetOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME.KEY=VALUE", help="What NAME is built with; may be repeated."),
]
NumServers = Annotated[int, typer.Option(min=1, help="Servers of each target.")]
MaxSessions = Annotated[int, typer.Option(min=1, help="Sessions of each server.")]
Isolation = Annotated[
    str | None,
    typer.Option(
        help="Where sessions run: inline, pool or process.",
        show_default="what fits the environment",
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="For HTTP and WebSocket; 0 takes any.", show_default="8000"
    ),
]
GrpcPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="For gRPC.", show_default="port + 10000")
]
TenantsFile = Annotated[
    Path | None, typer.Option(help="TOML file with tenants, their tokens and quotas.")
]
TokenEnv = Annotated[
    str | None,
    typer.Option(help="Variable with the one token of all.", show_default="LUDUS_GATEWAY_TOKEN"),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")
]


def gateway(
    config: ConfigFile = None,
    env: Targets = None,
    option: TargetOptions = None,
    servers: NumServers = 1,
    max_sessions: MaxSessions = 256,
    isolation: Isolation = None,
    host: Host = None,
    port: Port = None,
    grpc_port: GrpcPort = None,
    tenants: TenantsFile = None,
    token_env: TokenEnv = None,
    insecure: Insecure = False,
) -> None:
    """Serve environments on one address until Ctrl-C; a second Ctrl-C does not wait for sessions.

    Example: `ludus gateway --env blackjack=openspiel_env --option blackjack.game=blackjack`
    """
    from ludus.services.gateway.config import GatewayConfig
    from ludus.services.gateway.gateway import serve_gateway

    overrides: dict[str, Any] = {
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "tenants_file": tenants,
        "token_env": token_env,
        "insecure": insecure or None,
    }
    overrides = {name: value for name, value in overrides.items() if value is not None}
    environments = _environments(
        env or (),
        option or (),
        {"num_servers": servers, "max_sessions": max_sessions, "isolation": isolation},
    )
    if environments:
        overrides["environments"] = environments
    if config is not None:
        chosen = GatewayConfig.read(config, overrides)
    elif environments:
        chosen = GatewayConfig.of(overrides, "ludus gateway")
    else:
        raise ConfigError(f"expected --config or --env, got neither; {_EXAMPLE}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ludus").setLevel(logging.INFO)
    serve_gateway(chosen, _announce)


def _environments(
    targets: Sequence[str], options: Sequence[str], how: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The `environments` of a configuration, from `--env` and `--option`."""
    by_name: dict[str, dict[str, Any]] = {}
    for given in targets:
        name, separator, target = given.partition("=")
        if not separator or not name or not target:
            raise ConfigError(f"--env expected NAME=TARGET, got '{given}'; {_EXAMPLE}")
        if name in by_name:
            raise ConfigError(
                f"--env expected each name once, got '{name}' twice; put several addresses into"
                " one, with commas between"
            )
        if "://" in target:
            by_name[name] = {"kind": "static", "addresses": target.split(",")}
        else:
            by_name[name] = {"kind": "subprocess", "target": target, "options": {}, **how}
    for path, value in parse_options(options).items():
        name, separator, key = path.partition(".")
        environment = by_name.get(name)
        if not separator or not key or environment is None or "options" not in environment:
            local = [one for one, found in by_name.items() if "options" in found]
            raise ConfigError(
                f"--option expected NAME.KEY=VALUE with NAME one of {', '.join(local) or '-'}"
                f" (environments that are run here), got '{path}'"
            )
        environment["options"][key] = value
    return by_name


def _announce(running: Gateway) -> None:
    """Say where clients connect."""
    console = results_console()
    several = len(running.environments) > 1
    for name in running.environments:
        suffix = f"/{name}" if several else ""
        say(console, f"{name}: {running.http_address}/envs/{name} (OpenEnv clients)")
        say(console, f"{name}: {running.grpc_address}{suffix} (ludus.env clients)")
    say(console, f"all environments: {running.http_address}/v1/envs")
