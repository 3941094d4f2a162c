"""A program that runs a command as if Landlock had version 5, as before Linux 6.12.

    python old_kernel.py COMMAND...

Landlock of later versions also stops signals. Here only the other layers of the sandbox stop them.
A filter passes each question for the version to this process, which gives the answer.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import struct
import sys
import threading

_ANSWER = 5
_CREATE_RULESET, _SECCOMP = 444, 317
_GET_VERSION = 1
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ASK = 0x7FFF_0000, 0x7FC0_0000
_NUMBER_OFFSET, _FLAGS_OFFSET = 0, 32
_SET_NO_NEW_PRIVILEGES = 38
_RECEIVE, _SEND = 0xC050_2100, 0xC018_2101
_NOTIFICATION_BYTES = 80


def main(command: list[str]) -> int:
    """Run the command, and return its exit code."""
    listener = _install_filter()
    process_id = os.fork()
    if not process_id:
        os.execvp(command[0], command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: os.kill(process_id, number))
    threading.Thread(target=_answer, args=(listener,), daemon=True).start()
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def _install_filter() -> int:
    """Filter the calls of this process and its descendants; return the descriptor of questions."""
    instructions = (
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_IF_EQUAL, 0, 3, _CREATE_RULESET),
        (_LOAD, 0, 0, _FLAGS_OFFSET),
        (_JUMP_IF_EQUAL, 0, 1, _GET_VERSION),
        (_RETURN, 0, 0, _ASK),
        (_RETURN, 0, 0, _ALLOW),
    )
    content = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(content)
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    listener: int = libc.syscall(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "the filter cannot be installed")
    os.set_inheritable(listener, False)
    return listener


def _answer(listener: int) -> None:
    while True:
        notification = bytearray(_NOTIFICATION_BYTES)
        try:
            fcntl.ioctl(listener, _RECEIVE, notification)
            (question_id,) = struct.unpack_from("Q", notification)
            fcntl.ioctl(listener, _SEND, bytearray(struct.pack("QqiI", question_id, _ANSWER, 0, 0)))
        except FileNotFoundError:  # the process that asked has exited
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
