"""Size limits of calls and results. Each hop accepts more than the previous hop sends.

    client --16 MiB--> gateway --+64 KiB--> server --+64 KiB--> worker    one call
    client <----- any size ---------------- server <--32 MiB--- worker    one result

A call grows on its way, because ids and a trace are added and numbers are written as text. Each
hop checks a call's size again and refuses a call that is too large, because a message above the
next hop's limit would end the stream and every other call on it.
"""

from __future__ import annotations

_KIB, _MIB = 1024, 1024 * 1024
_GROWTH_BYTES = 64 * _KIB
"""Maximum number of bytes that a hop adds to a call: ids and a trace."""

MAX_MESSAGE_BYTES = 16 * _MIB
"""Maximum size of a client's WebSocket frame, HTTP body, or call over gRPC."""
MAX_GATEWAY_CALL_BYTES = MAX_MESSAGE_BYTES + _GROWTH_BYTES
"""Maximum size of a gateway's call to a server, and of a message to a gateway's gRPC port."""
MAX_SERVER_MESSAGE_BYTES = MAX_GATEWAY_CALL_BYTES + _GROWTH_BYTES
"""Maximum size of a message to a server's gRPC port."""
MAX_WORKER_CALL_BYTES = MAX_SERVER_MESSAGE_BYTES + _GROWTH_BYTES
"""Maximum size of a server's call to a worker."""
MAX_FRAME_BYTES = 64 * _MIB
"""Maximum size of a frame between a server and its workers; a larger frame is an error."""
MAX_RESULT_BYTES = 32 * _MIB
"""Maximum size of an environment's result of one call."""
MAX_REPLY_BYTES = 256 * _MIB
"""Maximum size of a result as JSON, where a character or tensor byte needs several bytes."""

MAX_BATCH_BYTES = 4 * _MIB
"""Maximum size of a batch; further calls and results go into the next message."""
MAX_CALLS_PER_MESSAGE = 1024
"""Maximum number of calls in a message. Above it, the stream ends."""
MAX_CALL_FIELDS = 64 * MAX_CALLS_PER_MESSAGE
"""Maximum number of fields in a message of calls."""
MAX_REPLY_FIELDS = 1024 * 1024
"""Maximum number of fields in a worker's frame; each legal action is a field."""
MAX_CALLS_AHEAD = 4096
"""Maximum number of calls of a stream that are read before an earlier call is answered."""
MAX_BYTES_AHEAD = 32 * _MIB
"""Maximum size of a stream's calls and results that wait."""

BODY_TIMEOUT_S = 30.0
"""Time limit for a whole HTTP body, so that a slow client does not hold a connection."""
