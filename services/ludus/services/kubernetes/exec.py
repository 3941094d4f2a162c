"""A command in a container of a pod, and what it writes: pods/exec over a WebSocket.

Each message begins with a byte that names its stream (protocol v4.channel.k8s.io): 1 is the
command's stdout, 2 its stderr, 3 a Status at its end.
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


async def output_of(
    api: KubernetesApi, namespace: str, pod: str, container: str, command: Sequence[str]
) -> AsyncGenerator[bytes]:
    """What a command writes to stdout, piece by piece.

    To be closed by whoever leaves it early (`contextlib.aclosing`).

    Raises:
        ClusterError: it could not be run or failed; what it said on stderr stands in the message.
    """
    path = f"{resource_path('v1', namespace, 'pods', pod)}/exec"
    query = [("container", container), ("stdout", "true"), ("stderr", "true")]
    query += [("command", part) for part in command]
    said, status = b"", None
    async with aclosing(api.messages(path, query, PROTOCOL)) as messages:
        async for message in messages:
            stream, content = message[:1], message[1:]
            if stream == bytes([_STDOUT]) and content:
                yield content
            elif stream == bytes([_STDERR]):
                said = (said + content)[-_MAX_STDERR_BYTES:]
            elif stream == bytes([_STATUS]):
                status = orjson.loads(content)
    _check_end(status, said.decode(errors="replace").strip(), f"pod {namespace}/{pod}")


def _check_end(status: JsonObject | None, said: str, place: str) -> None:
    if status is None:
        raise ClusterError(f"expected a command in {place} to end, but the connection ended first")
    if status.get("status") != "Success":
        reason = said or status.get("message", "no reason given")
        raise ClusterError(f"expected a command in {place} to succeed, got: {reason}")
