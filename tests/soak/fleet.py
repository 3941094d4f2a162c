"""The processes of the soak.

    clients --(balancer)--> gateway-kept --> inline-kept,  inline-2    event loop, threads
                            gateway-2    --> pool-kept,    pool-2      three workers each
                                         --> process-kept, process-2   a worker per session

No fault kills a process whose name ends with "kept". Workers run in sandboxes; inline servers have
none.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quiet_ports import quiet_ports

from tests.soak.client import ClientSpec, encode_spec
from tests.soak.environment import SERVER_VARIABLE
from tests.soak.options import SoakOptions
from tests.soak.processes import FleetProcess

KINDS = ("inline", "pool", "process")
PROTECTED_SUFFIX, KILLABLE_SUFFIX = "kept", "2"
GATEWAYS = ("gateway-kept", "gateway-2")
FLEET_VARIABLE = "LUDUS_SOAK"
STEP_TIMEOUT_S = 20.0
MAX_SESSIONS = {"inline": 300, "pool": 300, "process": 150}
NUM_WORKERS = 3
_MEMORY_LIMIT_MB, _DISK_LIMIT_MB = 400, 64
_NUM_STEPS = {"inline": (4, 24), "pool": (6, 40), "process": (10, 60)}
_SESSION_SHARES = {"inline": 0.5, "pool": 0.3, "process": 0.2}
TENANTS = ("steady", "killed", "sockets", "revoked", "saboteur")
QUOTA = 400
"""Session quota of each tenant, above its number of sessions and below the servers' capacity."""

_CLIENTS = (
    # name, wire, gateway, tenant, share of all sessions, is protected from kills
    ("grpc-kept", "grpc", "", "steady", 0.35, True),
    ("http-kept", "http", "", "steady", 0.15, True),
    ("socket-kept", "ws", GATEWAYS[0], "sockets", 0.15, True),
    ("grpc-2", "grpc", "", "killed", 0.15, False),
    ("socket-2", "ws", GATEWAYS[1], "sockets", 0.10, False),
    ("grpc-revoked", "grpc", "", "revoked", 0.05, True),
    ("socket-revoked", "ws", GATEWAYS[0], "revoked", 0.05, True),
)


class Fleet:
    """All processes and their shared files."""

    def __init__(self, options: SoakOptions) -> None:
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="ludus-soak-"))
        self.folder.chmod(0o711)
        self.temporary = self.folder / "tmp"
        """Folder for temporary files, which must be empty at the end."""
        self.temporary.mkdir()
        self.temporary.chmod(0o711)
        self.logs = self.folder / "logs"
        self.logs.mkdir()
        self.mark = secrets.token_hex(8)
        self.tokens = {tenant: secrets.token_hex(16) for tenant in TENANTS}
        self._key = secrets.token_hex(32)
        ports = iter(quiet_ports(3 * 6 + 3 * len(GATEWAYS) + 2))
        self.grpc_addresses: dict[str, str] = {}
        self.http_addresses: dict[str, str] = {}
        """Addresses of the servers, the gateways and the balancer, by name."""
        self.servers = {member.name: member for member in self._make_servers(ports)}
        self.write_tenants(TENANTS)
        self.gateways = {member.name: member for member in self._make_gateways(ports)}
        self.balancer = self._make_balancer(ports)
        self.clients = {member.name: member for member in self._make_clients()}

    @property
    def measured_processes(self) -> list[FleetProcess]:
        """Processes whose memory is measured."""
        return [*self.servers.values(), *self.gateways.values(), *self.clients.values()]

    async def start(self) -> None:
        """Start servers, gateways and the balancer."""
        await asyncio.gather(*(member.start() for member in self.servers.values()))
        await asyncio.gather(*(member.start() for member in self.gateways.values()))
        await self.balancer.start()

    async def stop(self) -> list[str]:
        """Stop all processes and return the errors."""
        members = (*self.gateways.values(), *self.servers.values())
        errors = [await member.stop() for member in members]
        await self.balancer.kill()
        return [error for error in errors if error]

    async def kill_clients(self) -> None:
        """Kill the running clients."""
        for member in self.clients.values():
            if member.process is not None and member.process.returncode is None:
                await member.kill()

    async def kill_all(self) -> None:
        """Kill all processes."""
        await self.kill_clients()
        for member in (*self.gateways.values(), *self.servers.values(), self.balancer):
            if member.process is not None and member.process.returncode is None:
                await member.kill()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def write_tenants(self, names: tuple[str, ...]) -> None:
        """Write the list of accepted tenants."""
        path = self.folder / "tenants.toml"
        entries = [
            f'[[tenants]]\nname = "{name}"\nmax_sessions = {QUOTA}\ntoken_sha256 ='
            f' "{hashlib.sha256(self.tokens[name].encode()).hexdigest()}"\n'
            for name in names
        ]
        new_path = path.with_suffix(".new")
        new_path.write_text("\n".join(entries))
        new_path.replace(path)

    def _environment(self, **extra: str) -> dict[str, str]:
        inherited = {
            name: text for name, text in os.environ.items() if not name.startswith("LUDUS_")
        }
        fleet_variables = {
            FLEET_VARIABLE: self.mark,
            "TMPDIR": str(self.temporary),
            "LUDUS_SESSION_KEY": self._key,
        }
        return {**inherited, **fleet_variables, **extra}

    def _make_servers(self, ports: Iterator[int]) -> Iterator[FleetProcess]:
        for kind in KINDS:
            for suffix in (PROTECTED_SUFFIX, KILLABLE_SUFFIX):
                name = f"{kind}-{suffix}"
                http, grpc, admin = (next(ports) for _ in range(3))
                self.http_addresses[name] = f"http://127.0.0.1:{http}"
                self.grpc_addresses[name] = f"grpc://127.0.0.1:{grpc}"
                arguments = [
                    "-m",
                    "ludus.env",
                    _choose_target(kind, suffix),
                    "--no-determinism-check",
                ]
                arguments += ["--port", str(http), "--grpc-port", str(grpc)]
                arguments += ["--admin-port", str(admin), "--isolation", kind]
                arguments += ["--max-sessions", str(MAX_SESSIONS[kind])]
                arguments += ["--idle-timeout-s", f"{self.options.idle_timeout_s:g}"]
                if kind != "inline":
                    arguments += ["--step-timeout-s", f"{STEP_TIMEOUT_S:g}"]
                    arguments += ["--memory-limit-mb", str(_MEMORY_LIMIT_MB)]
                    arguments += ["--disk-limit-mb", str(_DISK_LIMIT_MB)]
                    arguments += ["--pass-env", FLEET_VARIABLE, "--pass-env", SERVER_VARIABLE]
                if kind == "pool":
                    arguments += ["--num-workers", str(NUM_WORKERS)]
                yield self._make_process(name, arguments, admin, suffix, {SERVER_VARIABLE: name})

    def _make_gateways(self, ports: Iterator[int]) -> Iterator[FleetProcess]:
        for name in GATEWAYS:
            http, grpc, admin = (next(ports) for _ in range(3))
            self.http_addresses[name] = f"http://127.0.0.1:{http}"
            self.grpc_addresses[name] = f"grpc://127.0.0.1:{grpc}"
            config = self.folder / f"{name}.toml"
            lines = [
                f"port = {http}\ngrpc_port = {grpc}\nadmin_port = {admin}",
                f'tenants_file = "{self.folder / "tenants.toml"}"\ndrain_grace_s = 10.0',
                f"[sessions]\nlinger_s = {self.options.linger_s}",
            ]
            for kind in KINDS:
                addresses = [
                    self.grpc_addresses[f"{kind}-{suffix}"]
                    for suffix in (PROTECTED_SUFFIX, KILLABLE_SUFFIX)
                ]
                lines.append(f'[environments.{kind}]\nkind = "static"\naddresses = {addresses!r}')
            config.write_text("\n".join(lines) + "\n")
            command = ["-c", "from ludus.services.cli.app import main; main()", "gateway"]
            arguments = [*command, "--config", str(config)]
            suffix = PROTECTED_SUFFIX if name.endswith(PROTECTED_SUFFIX) else KILLABLE_SUFFIX
            yield self._make_process(name, arguments, admin, suffix, {})

    def _make_process(
        self, name: str, arguments: list[str], admin: int, suffix: str, variables: dict[str, str]
    ) -> FleetProcess:
        return FleetProcess(
            name,
            arguments,
            self._environment(**variables),
            self.logs / f"{name}.log",
            admin=f"http://127.0.0.1:{admin}",
            is_protected=suffix == PROTECTED_SUFFIX,
        )

    def _make_balancer(self, ports: Iterator[int]) -> FleetProcess:
        http, grpc = next(ports), next(ports)
        pairs = [(http, self.http_addresses), (grpc, self.grpc_addresses)]
        rules = [
            f"{port}:" + ",".join(values[name].rpartition(":")[2] for name in GATEWAYS)
            for port, values in pairs
        ]
        self.http_addresses["balancer"] = f"http://127.0.0.1:{http}"
        self.grpc_addresses["balancer"] = f"grpc://127.0.0.1:{grpc}"
        log = self.logs / "balancer.log"
        arguments = ["-m", "tests.soak.balancer", *rules]
        return FleetProcess("balancer", arguments, self._environment(), log)

    def _make_clients(self) -> Iterator[FleetProcess]:
        for name, wire, gateway, tenant, share, is_protected in _CLIENTS:
            values = self.grpc_addresses if wire == "grpc" else self.http_addresses
            base = values[gateway or "balancer"]
            path = "" if wire == "grpc" else "/envs"
            total = self.options.sessions * share
            spec = ClientSpec(
                name=name,
                wire=wire,
                gateway=gateway,
                tenant=tenant,
                token=self.tokens[tenant],
                seed=self.options.seed,
                addresses={kind: f"{base}{path}/{kind}" for kind in KINDS},
                num_sessions={kind: round(total * _SESSION_SHARES[kind]) for kind in KINDS},
                num_steps=_NUM_STEPS,
            )
            yield FleetProcess(
                name,
                ["-m", "tests.soak.client", encode_spec(spec)],
                self._environment(),
                self.logs / f"{name}.log",
                is_protected=is_protected,
                reads_commands=True,
            )


def _choose_target(kind: str, suffix: str) -> str:
    is_threaded = suffix == KILLABLE_SUFFIX and kind != "process"
    return f"tests.soak.environment:{'ThreadedEchoEnv' if is_threaded else 'EchoEnv'}"
