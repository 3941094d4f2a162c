"""`ludus gateway`: environments on one address, served by local or remote servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.proto.errors import ConfigError
from ludus.services.cli.console import print_line, results_console
from ludus.services.cli.options import parse_options

if TYPE_CHECKING:
    from ludus.services.gateway.gateway import Gateway

_EXAMPLE = "for example --env blackjack=openspiel_env or --env cards=grpc://10.0.0.7:18000"


def _port_option(protocols: str, default: str) -> Any:
    text = f"Port for {protocols}; 0 picks a free port."
    return typer.Option(min=0, max=65535, help=text, show_default=default)


ConfigFile = Annotated[
    Path | None, typer.Option(help="Gateway configuration, TOML. Options override its fields.")
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=TARGET",
        help="Environment to serve: a target to run on this machine, or a comma-separated list "
        "of grpc:// addresses. Repeatable.",
    ),
]
TargetOptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME.KEY=VALUE",
        help="Option for the constructor of environment NAME. Repeatable.",
    ),
]
NumServers = Annotated[int, typer.Option(min=1, help="Number of servers per target.")]
MaxSessions = Annotated[int, typer.Option(min=1, help="Maximum sessions per server.")]
Isolation = Annotated[
    str | None,
    typer.Option(
        help="Isolation of sessions: inline, pool or process.",
        show_default="chosen for the environment",
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[int | None, _port_option("HTTP and WebSocket", "8000")]
GrpcPort = Annotated[int | None, _port_option("gRPC", "port + 10000")]
TenantsFile = Annotated[
    Path | None, typer.Option(help="File with tenants, tokens and quotas, TOML.")
]
TokenEnv = Annotated[
    str | None,
    typer.Option(
        help="Environment variable with the token shared by all clients.",
        show_default="LUDUS_GATEWAY_TOKEN",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow other machines to connect without a token.")
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
    """Serve environments on one address until Ctrl-C.

    The first Ctrl-C waits for open sessions, the second stops at once.

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
        chosen = GatewayConfig.parse(overrides, "ludus gateway")
    else:
        raise ConfigError(f"--config or --env is required; {_EXAMPLE}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ludus").setLevel(logging.INFO)
    serve_gateway(chosen, _announce)


def _environments(
    targets: Sequence[str], options: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Build the `environments` section from `--env` and `--option`."""
    by_name: dict[str, dict[str, Any]] = {}
    for pair in targets:
        name, separator, target = pair.partition("=")
        if not separator or not name or not target:
            raise ConfigError(f"--env must be NAME=TARGET, got '{pair}'; {_EXAMPLE}")
        if name in by_name:
            raise ConfigError(
                f"--env names '{name}' twice; separate several addresses of one environment by"
                " commas"
            )
        if "://" in target:
            by_name[name] = {"kind": "static", "addresses": target.split(",")}
        else:
            by_name[name] = {"kind": "subprocess", "target": target, "options": {}, **settings}
    for path, value in parse_options(options).items():
        name, separator, key = path.partition(".")
        environment = by_name.get(name)
        if not separator or not key or environment is None or "options" not in environment:
            local = [name for name, settings in by_name.items() if "options" in settings]
            raise ConfigError(
                f"--option must be NAME.KEY=VALUE, where NAME is an environment that runs on this"
                f" machine ({', '.join(local) or 'there is none'}), got '{path}'"
            )
        environment["options"][key] = value
    return by_name


def _announce(running: Gateway) -> None:
    """Print the addresses for clients."""
    console = results_console()
    for name in running.environments:
        suffix = f"/{name}" if len(running.environments) > 1 else ""
        print_line(console, f"{name}: {running.http_address}/envs/{name} (OpenEnv clients)")
        print_line(console, f"{name}: {running.grpc_address}{suffix} (ludus.env clients)")
    print_line(console, f"all environments: {running.http_address}/v1/envs")
