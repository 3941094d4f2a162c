"""The processes of the soak.

    clients --(balancer)--> gateway-kept --> inline-kept,  inline-2    on the event loop; threads
                            gateway-2    --> pool-kept,    pool-2      three workers each
                                         --> process-kept, process-2   a worker for each session

What is called kept is never killed. Workers are in their sandbox, inline servers have none.
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

from tests.soak.client import ClientSpec, spec_text
from tests.soak.environment import SERVER_VARIABLE
from tests.soak.members import Member
from tests.soak.options import SoakOptions

KINDS = ("inline", "pool", "process")
KEPT, KILLED = "kept", "2"
GATEWAYS = ("gateway-kept", "gateway-2")
MARK_VARIABLE = "LUDUS_SOAK"
STEP_TIMEOUT_S = 20.0
MAX_SESSIONS = {"inline": 300, "pool": 300, "process": 150}
NUM_WORKERS = 3
_MEMORY_LIMIT_MB, _DISK_LIMIT_MB = 400, 64
_LIVES = {"inline": (4, 24), "pool": (6, 40), "process": (10, 60)}
_SHARES = {"inline": 0.5, "pool": 0.3, "process": 0.2}
TENANTS = ("steady", "killed", "sockets", "revoked", "saboteur")
QUOTA = 400
"""Quota of every tenant: more than it uses, and less than the servers' capacity."""

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
        """Folder of all temporary files, which must be empty at the end."""
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
        """Return the addresses of servers, gateways and the balancer by name."""
        self.servers = {member.name: member for member in self._servers(ports)}
        self.write_tenants(TENANTS)
        self.gateways = {member.name: member for member in self._gateways(ports)}
        self.balancer = self._balancer(ports)
        self.clients = {member.name: member for member in self._clients()}

    @property
    def long_lived(self) -> list[Member]:
        """Members whose memory is measured."""
        return [*self.servers.values(), *self.gateways.values(), *self.clients.values()]

    async def start(self) -> None:
        """Start servers and gateways."""
        await asyncio.gather(*(member.start() for member in self.servers.values()))
        await asyncio.gather(*(member.start() for member in self.gateways.values()))
        await self.balancer.start()

    async def stop(self) -> list[str]:
        """Stop all processes and return the problems."""
        members = (*self.gateways.values(), *self.servers.values())
        faults = [await member.stop() for member in members]
        await self.balancer.kill()
        return [fault for fault in faults if fault]

    async def kill_clients(self) -> None:
        """Stop the running clients."""
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
        unfinished = path.with_suffix(".new")
        unfinished.write_text("\n".join(entries))
        unfinished.replace(path)

    def _environment(self, **extra: str) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("LUDUS_")}
        own_options = {
            MARK_VARIABLE: self.mark,
            "TMPDIR": str(self.temporary),
            "LUDUS_SESSION_KEY": self._key,
        }
        return {**kept, **own_options, **extra}

    def _servers(self, ports: Iterator[int]) -> Iterator[Member]:
        for kind in KINDS:
            for suffix in (KEPT, KILLED):
                name = f"{kind}-{suffix}"
                http, grpc, admin = (next(ports) for _ in range(3))
                self.http_addresses[name] = f"http://127.0.0.1:{http}"
                self.grpc_addresses[name] = f"grpc://127.0.0.1:{grpc}"
                arguments = ["-m", "ludus.env", _target(kind, suffix), "--no-determinism-check"]
                arguments += ["--port", str(http), "--grpc-port", str(grpc)]
                arguments += ["--admin-port", str(admin), "--isolation", kind]
                arguments += ["--max-sessions", str(MAX_SESSIONS[kind])]
                arguments += ["--idle-timeout-s", f"{self.options.idle_timeout_s:g}"]
                if kind != "inline":
                    arguments += ["--step-timeout-s", f"{STEP_TIMEOUT_S:g}"]
                    arguments += ["--memory-limit-mb", str(_MEMORY_LIMIT_MB)]
                    arguments += ["--disk-limit-mb", str(_DISK_LIMIT_MB)]
                    arguments += ["--pass-env", MARK_VARIABLE, "--pass-env", SERVER_VARIABLE]
                if kind == "pool":
                    arguments += ["--num-workers", str(NUM_WORKERS)]
                yield self._member(name, arguments, admin, suffix, {SERVER_VARIABLE: name})

    def _gateways(self, ports: Iterator[int]) -> Iterator[Member]:
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
                addresses = [self.grpc_addresses[f"{kind}-{suffix}"] for suffix in (KEPT, KILLED)]
                lines.append(f'[environments.{kind}]\nkind = "static"\naddresses = {addresses!r}')
            config.write_text("\n".join(lines) + "\n")
            command = ["-c", "from ludus.services.cli.app import main; main()", "gateway"]
            arguments = [*command, "--config", str(config)]
            suffix = KEPT if name.endswith(KEPT) else KILLED
            yield self._member(name, arguments, admin, suffix, {})

    def _member(
        self, name: str, arguments: list[str], admin: int, suffix: str, variables: dict[str, str]
    ) -> Member:
        return Member(
            name,
            arguments,
            self._environment(**variables),
            self.logs / f"{name}.log",
            admin=f"http://127.0.0.1:{admin}",
            is_kept=suffix == KEPT,
        )

    def _balancer(self, ports: Iterator[int]) -> Member:
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
        return Member("balancer", arguments, self._environment(), log)

    def _clients(self) -> Iterator[Member]:
        for name, wire, gateway, tenant, share, is_kept in _CLIENTS:
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
                doors={kind: f"{base}{path}/{kind}" for kind in KINDS},
                num_sessions={kind: round(total * _SHARES[kind]) for kind in KINDS},
                num_steps=_LIVES,
            )
            yield Member(
                name,
                ["-m", "tests.soak.client", spec_text(spec)],
                self._environment(),
                self.logs / f"{name}.log",
                is_kept=is_kept,
                reads_orders=True,
            )


def _target(kind: str, suffix: str) -> str:
    is_threaded = suffix == KILLED and kind != "process"
    return f"tests.soak.environment:{'ThreadedEchoEnv' if is_threaded else 'EchoEnv'}"
