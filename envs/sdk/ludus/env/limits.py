"""How much may travel at once: each hop takes more than the one before it sends.

    client --16 MiB--> gateway --+64 KiB--> server --32 MiB--> worker    calls
    client <---------------- any size ----- server <--32 MiB-- worker    answers

A call grows on its way: by the session's id, by a trace, by numbers that are written out. Whoever
passes one on therefore looks at its size again, and refuses it alone: a message above what the
next hop takes would end the stream, with everybody else's calls on it.
"""

from __future__ import annotations

_MIB = 1024 * 1024
_ENVELOPE_BYTES = 64 * 1024
"""What a hop may add to a call, or to a message of one call."""

MAX_BATCH_BYTES = 4 * _MIB
"""Calls or answers beyond this travel in the next message."""
MAX_MESSAGE_BYTES = 16 * _MIB
"""A client's WebSocket frame, HTTP body, or one call over gRPC."""
MAX_RESULT_BYTES = 32 * _MIB
"""What an environment answers to one call."""
MAX_FRAME_BYTES = 64 * _MIB
"""Between a server and its workers, either way; who sends more is taken for broken."""
