"""How much may travel at once: each hop takes more than the one before it sends.

    client --16 MiB--> gateway --+64 KiB--> server --+64 KiB--> worker    one call
    client <----- any size ---------------- server <--32 MiB--- worker    one answer

A call grows on its way: by a trace, by numbers that are written out. Whoever passes one on looks
at its size again and refuses it alone: a message above what the next hop takes would end the
stream, with everybody else's calls on it.
"""

from __future__ import annotations

_KIB, _MIB = 1024, 1024 * 1024
_GROWTH_BYTES = 64 * _KIB
"""What a hop adds to a call at most: ids, a trace."""

MAX_MESSAGE_BYTES = 16 * _MIB
"""A client's WebSocket frame, HTTP body, or one call over gRPC."""
MAX_GATEWAY_CALL_BYTES = MAX_MESSAGE_BYTES + _GROWTH_BYTES
"""One call of a gateway to a server, and what the gRPC port of a gateway takes at once."""
MAX_SERVER_MESSAGE_BYTES = MAX_GATEWAY_CALL_BYTES + _GROWTH_BYTES
"""What the gRPC port of a server takes at once."""
MAX_WORKER_CALL_BYTES = MAX_SERVER_MESSAGE_BYTES + _GROWTH_BYTES
"""One call of a server to a worker."""
MAX_FRAME_BYTES = 64 * _MIB
"""Between a server and its workers, either way; who sends more is taken for broken."""
MAX_RESULT_BYTES = 32 * _MIB
"""What an environment answers to one call."""
MAX_REPLY_BYTES = 256 * _MIB
"""An answer as JSON, where each character and each byte of a tensor takes several."""

MAX_BATCH_BYTES = 4 * _MIB
"""Calls and answers that would make a message larger travel in the next one."""
MAX_CALLS_PER_MESSAGE = 1024
"""Calls in one message, and steps in one call: who sends more is cut off."""
MAX_CALL_FIELDS = 64 * MAX_CALLS_PER_MESSAGE
"""Fields of one message of calls, whatever its bytes."""
MAX_REPLY_FIELDS = 1024 * 1024
"""Fields of one frame of a worker: each legal answer is one."""
MAX_CALLS_AHEAD = 4096
"""Calls of one stream that are read before an earlier one is answered."""
MAX_BYTES_AHEAD = 32 * _MIB
"""The same in bytes, of calls that wait and of answers that are not taken."""

BODY_TIMEOUT_S = 30.0
"""For a whole HTTP body: a client that drips bytes does not hold a connection for ever."""
