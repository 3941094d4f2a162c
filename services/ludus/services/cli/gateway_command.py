"""`ludus gateway`: serves the environments of local and remote servers on one address."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.env.text.terminal import log_to_stderr
from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home
from ludus.services.cli.console import get_stdout, print_line
from ludus.services.cli.options import parse_options

if TYPE_CHECKING:
    from ludus.services.gateway.gateway import Gateway

_OPTION_NAMES = {
    "num_servers": "--servers",
    "max_sessions": "--max-sessions",
    "isolation": "--isolation",
}
"""Options of servers on this machine, by the field of the configuration."""
_EXAMPLE = "for example --env blackjack=openspiel_env or --env cards=grpc://10.0.0.7:18000"


def _make_port_option(protocols: str, default: str) -> Any:
    help_text = f"Port for {protocols}; 0 picks a free port."
    return typer.Option(min=0, max=65535, help=help_text, show_default=default)


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Gateway configuration, TOML. Options override its fields.",
        callback=expand_home,
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME=TARGET",
        help="Environment to serve: a target to run on this machine, or a comma-separated list "
        "of grpc:// addresses. Repeatable.",
    ),
]
TargetOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME.KEY=VALUE",
        help="Option for the constructor of environment NAME. Repeatable.",
    ),
]
NumServers = Annotated[
    int | None,
    typer.Option(
        "--servers", min=1, help="Number of servers per target of --env.", show_default="1"
    ),
]
MaxSessions = Annotated[
    int | None,
    typer.Option(
        min=1, help="Maximum sessions per server of a target of --env.", show_default="256"
    ),
]
Isolation = Annotated[
    str | None,
    typer.Option(
        help="Isolation of sessions of the targets of --env: inline, pool or process.",
        show_default="depends on the environment",
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[int | None, _make_port_option("HTTP and WebSocket", "8000")]
GrpcPort = Annotated[int | None, _make_port_option("gRPC", "port + 10000")]
TenantsFile = Annotated[
    Path | None,
    typer.Option(
        "--tenants",
        help="TOML file of tenants, with their token sources and quotas.",
        callback=expand_home,
    ),
]
TokenEnv = Annotated[
    str | None,
    typer.Option(
        help="Environment variable with the token shared by all clients.",
        show_default="LUDUS_GATEWAY_TOKEN",
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Host name that requests may have when the gateway listens on loopback, for example "
        "the name of a proxy on this machine. Repeatable. Default: names of loopback only.",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow other machines to connect without a token.")
]


def run_gateway(
    config_path: ConfigFile = None,
    targets: Targets = None,
    target_options: TargetOptions = None,
    num_servers: NumServers = None,
    max_sessions: MaxSessions = None,
    isolation: Isolation = None,
    host: Host = None,
    port: Port = None,
    grpc_port: GrpcPort = None,
    allowed_hosts: AllowedHosts = None,
    tenants_file: TenantsFile = None,
    token_env: TokenEnv = None,
    is_insecure: Insecure = False,
) -> None:
    """Serve environments on one address until Ctrl-C.

    The first Ctrl-C waits for open sessions, the second stops at once.

    Example: `ludus gateway --env blackjack=openspiel_env --option blackjack.game=blackjack`
    """
    from ludus.services.gateway.config import GatewayConfig
    from ludus.services.gateway.gateway import serve_gateway

    settings = {"num_servers": num_servers, "max_sessions": max_sessions, "isolation": isolation}
    environments = _parse_environments(
        targets or (),
        target_options or (),
        {name: setting for name, setting in settings.items() if setting is not None},
    )
    overrides: dict[str, Any] = {
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "allow_host": allowed_hosts,
        "tenants_file": tenants_file,
        "token_env": token_env,
        "insecure": is_insecure or None,
        "environments": environments or None,
    }
    overrides = {name: setting for name, setting in overrides.items() if setting is not None}
    if config_path is not None:
        config = GatewayConfig.read(config_path, overrides)
    elif environments:
        config = GatewayConfig.parse(overrides, "ludus gateway")
    else:
        raise ConfigError(f"--config or --env is required; {_EXAMPLE}")
    log_to_stderr(logging.WARNING)
    logging.getLogger("ludus").setLevel(logging.INFO)
    serve_gateway(config, _print_addresses)


def _parse_environments(
    targets: Sequence[str], options: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Build the `environments` section from `--env` and `--option`."""
    sections: dict[str, dict[str, Any]] = {}
    for pair in targets:
        name, separator, target = pair.partition("=")
        if not separator or not name or not target:
            raise ConfigError(f"--env must be NAME=TARGET, got '{pair}'; {_EXAMPLE}")
        if name in sections:
            remedy = "separate several addresses of one environment by commas"
            raise ConfigError(f"--env names '{name}' twice; {remedy}")
        if "://" in target:
            sections[name] = {"kind": "static", "addresses": target.split(",")}
        else:
            sections[name] = {"kind": "subprocess", "target": target, "options": {}, **settings}
    local_names = [name for name, section in sections.items() if "options" in section]
    if settings and not local_names:
        setting_name, setting = next(iter(settings.items()))
        raise ConfigError(
            f"{_OPTION_NAMES[setting_name]} applies to targets of --env that run on this machine,"
            f" and there is none, got {setting!r}; set environments.NAME.{setting_name} in the"
            " file of --config, or give the option to each server at an address"
        )
    for option_name, option_value in parse_options(options).items():
        name, _, key = option_name.partition(".")
        if not key or name not in local_names:
            raise ConfigError(
                f"--option must be NAME.KEY=VALUE, where NAME is an environment that runs on this"
                f" machine ({', '.join(local_names) or 'there is none'}), got '{option_name}'"
            )
        sections[name]["options"][key] = option_value
    return sections


def _print_addresses(gateway: Gateway) -> None:
    console = get_stdout()
    for name in gateway.environments:
        suffix = f"/{name}" if len(gateway.environments) > 1 else ""
        print_line(console, f"{name}: {gateway.http_address}/envs/{name} (OpenEnv clients)")
        print_line(console, f"{name}: {gateway.grpc_address}{suffix} (ludus.env clients)")
    print_line(console, f"all environments: {gateway.http_address}/v1/envs")
