"""`ludus gateway`: serves environments on one address, from servers here or elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.proto.errors import ConfigError
from ludus.services.cli.console import results_console, say
from ludus.services.cli.options import parse_options

if TYPE_CHECKING:
    from ludus.services.gateway.gateway import Gateway

_EXAMPLE = "for example --env blackjack=openspiel_env or --env cards=grpc://10.0.0.7:18000"


def gateway(
    config: Annotated[
        Path | None, typer.Option(help="TOML file; options given beside it have precedence.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TARGET",
            help="An environment package to run here, or grpc:// addresses with commas between;"
            " may be repeated.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME.KEY=VALUE", help="What NAME is built with; may be repeated."),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Servers of each package.")] = 1,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions of each server.")] = 256,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="For HTTP and WebSocket; 0 takes any.")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="For gRPC; port + 10000 if not set.")
    ] = None,
    tenants: Annotated[
        Path | None, typer.Option(help="TOML file with tenants, their tokens and quotas.")
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the one token of everybody.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")
    ] = False,
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
    environments = _environments(env or (), option or (), servers, max_sessions)
    if environments:
        overrides["environments"] = environments
    if config is not None:
        chosen = GatewayConfig.read(config, overrides)
    elif environments:
        chosen = GatewayConfig.of(overrides, "ludus gateway")
    else:
        raise ConfigError(f"expected --config or --env, got neither; {_EXAMPLE}")
    _check_packages(chosen.model_dump()["environments"])
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    serve_gateway(chosen, _announce)


def _environments(
    targets: Sequence[str], options: Sequence[str], num_servers: int, max_sessions: int
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
            by_name[name] = {
                "kind": "subprocess",
                "package": target,
                "options": {},
                "num_servers": num_servers,
                "max_sessions": max_sessions,
            }
    for path, value in parse_options(options).items():
        name, separator, key = path.partition(".")
        environment = by_name.get(name)
        if not separator or not key or environment is None or "options" not in environment:
            packages = [one for one, found in by_name.items() if "options" in found]
            raise ConfigError(
                f"--option expected NAME.KEY=VALUE with NAME one of {', '.join(packages) or '-'}"
                f" (environments that are run here), got '{path}'"
            )
        environment["options"][key] = value
    return by_name


def _check_packages(environments: dict[str, dict[str, Any]]) -> None:
    from ludus.env.packages import require_package

    for environment in environments.values():
        if environment["kind"] == "subprocess":
            require_package(environment["package"])


def _announce(running: Gateway) -> None:
    """Says where clients connect."""
    console = results_console()
    several = len(running.environments) > 1
    for name in running.environments:
        suffix = f"/{name}" if several else ""
        say(console, f"{name}: {running.http_address}/envs/{name} (OpenEnv clients)")
        say(console, f"{name}: {running.grpc_address}{suffix} (ludus.env clients)")
    say(console, f"all environments: {running.http_address}/v1/envs")
