"""Execution of a command in a container of a pod: pods/exec over a WebSocket.

The first byte of each message is its stream in protocol v4.channel.k8s.io: 1 is stdout, 2 is
stderr, and 3 is the Status that follows the command's exit.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import orjson

from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.api import JsonObject, KubernetesApi, resource_path

PROTOCOL = "v4.channel.k8s.io"
_STDOUT, _STDERR, _STATUS = 1, 2, 3
_MAX_STDERR_BYTES = 2000


async def stream_command_output(
    api: KubernetesApi, namespace: str, pod: str, container: str, command: Sequence[str]
) -> AsyncGenerator[bytes]:
    """Run a command and yield its stdout in pieces.

    A caller that stops early must close the generator (`contextlib.aclosing`).

    Raises:
        ClusterError: the command could not be run, or it failed. The message contains its stderr.
    """
    path = f"{resource_path('v1', namespace, 'pods', pod)}/exec"
    query = [("container", container), ("stdout", "true"), ("stderr", "true")]
    query += [("command", part) for part in command]
    stderr, status = b"", None
    async with aclosing(api.messages(path, query, PROTOCOL)) as messages:
        async for message in messages:
            stream, content = message[:1], message[1:]
            if stream == bytes([_STDOUT]) and content:
                yield content
            elif stream == bytes([_STDERR]):
                stderr = (stderr + content)[-_MAX_STDERR_BYTES:]
            elif stream == bytes([_STATUS]):
                status = orjson.loads(content)
    _check_status(status, stderr.decode(errors="replace").strip(), f"pod {namespace}/{pod}")


def _check_status(status: JsonObject | None, stderr: str, container: str) -> None:
    if status is None:
        raise ClusterError(f"the connection to {container} closed before the command finished")
    if status.get("status") != "Success":
        reason = stderr or status.get("message", "no reason given")
        raise ClusterError(f"a command in {container} failed: {reason}")
