"""`python -m ludus.env.serving.server_keys`: derive the secrets of one server, and follow changes.

    session keys, environment tokens --HMAC of the server id--> FOLDER/server-key, FOLDER/token

In a pod, this program runs in a container next to the environment's. Only this container has the
secrets of the fleet. The environment's container has the folder with the derived secrets, which no
other server accepts.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ludus.env.sandbox.processes import hide_process
from ludus.env.security.secret_files import CHECK_INTERVAL_S, ReadSecrets, follow_secrets
from ludus.env.security.session_ids import (
    derive_server_key,
    derive_server_token,
    make_pod_server_id,
)
from ludus.env.sessions.options import read_server_id
from ludus.env.text.terminal import format_notice, log_to_stderr
from ludus.proto.errors import UserError
from ludus.proto.paths import parse_path

SERVER_KEY_NAME = "server-key"
TOKEN_NAME = "token"


class DerivedFile:
    """A file with one derived secret for each secret of the fleet."""

    def __init__(
        self, path: Path, read_secrets: ReadSecrets, derive: Callable[[str, str], str]
    ) -> None:
        self._path = path
        self._read_secrets = read_secrets
        self._derive = derive
        self._secrets: tuple[str, ...] = ()

    def update(self, server_id: str) -> None:
        """Write the file if the secrets have changed."""
        secrets = self._read_secrets()
        if secrets == self._secrets:
            return
        lines = [self._derive(secret, server_id) for secret in secrets]
        new_path = self._path.with_name(f"{self._path.name}.new")
        new_path.unlink(missing_ok=True)
        new_path.touch(mode=0o600)
        new_path.write_text("".join(f"{line}\n" for line in lines))
        new_path.replace(self._path)
        self._secrets = secrets


def main(argv: Sequence[str] | None = None) -> None:
    """Derive the secrets until SIGTERM, then exit with 0; exit with 2 after a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m ludus.env.serving.server_keys",
        description="Derive the key and the token of one server from those of its fleet. The"
        " variable POD_UID, or LUDUS_SERVER_ID, identifies the server.",
    )
    parser.add_argument("--session-key-file", type=parse_path, required=True, help="session keys")
    parser.add_argument("--token-file", type=parse_path, required=True, help="tokens of servers")
    parser.add_argument("--folder", type=parse_path, required=True, help="folder of derived files")
    arguments = parser.parse_args(argv)
    log_to_stderr(logging.INFO)
    hide_process()
    stop_event = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop_event.set())
    try:
        # Without the variable, the message names POD_UID.
        server_id = read_server_id() or make_pod_server_id("")
        folder = arguments.folder
        read_keys = follow_secrets(arguments.session_key_file)
        read_tokens = follow_secrets(arguments.token_file)
    except UserError as error:
        sys.stderr.write(f"{format_notice('error', error)}\n")
        sys.exit(UserError.exit_code)
    files = [
        DerivedFile(folder / TOKEN_NAME, read_tokens, derive_server_token),
        DerivedFile(folder / SERVER_KEY_NAME, read_keys, derive_server_key),
    ]
    while True:
        for file in files:
            file.update(server_id)
        if stop_event.wait(CHECK_INTERVAL_S):
            return


if __name__ == "__main__":
    main()
