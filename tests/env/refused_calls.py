"""A program that installs the filter of system calls and reports the outcome of each call.

Usage: `python refused_calls.py PID shared|own|computing`. PID is the process that the calls attack.
The program prints a JSON object with "done" or the name of the error number for each call.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import socket
import struct
import sys
import tempfile

from ludus.env.sandbox.processes import give_up_privileges
from ludus.env.sandbox.seccomp import refuse_system_calls

_NUMBERS = {"x86_64": {"fcntl": 72, "ioctl": 16}, "aarch64": {"fcntl": 25, "ioctl": 29}}
_HIGH_BIT = 1 << 32
"""Bit that the kernel ignores in a command."""


def call_kernel(number: int, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "syscall")


def main(pid: int, mode: str) -> dict[str, str]:
    """Install the filter and return the outcome of each call."""
    local_socket, _remote_socket = socket.socketpair()
    pipe_end = os.pipe()[0]
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the process exits soon
    descriptor, pid_bytes = local_socket.fileno(), struct.pack("i", pid)
    numbers = _NUMBERS[platform.machine()]
    calls = {
        "F_SETOWN": lambda: fcntl.fcntl(pipe_end, fcntl.F_SETOWN, pid),
        "F_SETOWN of a group": lambda: fcntl.fcntl(pipe_end, fcntl.F_SETOWN, -os.getpgid(pid)),
        "F_SETOWN of a socket": lambda: fcntl.fcntl(descriptor, fcntl.F_SETOWN, pid),
        "F_SETOWN with a high bit": lambda: call_kernel(
            numbers["fcntl"], pipe_end, _HIGH_BIT | 8, pid
        ),
        "F_SETOWN_EX": lambda: fcntl.fcntl(pipe_end, 15, struct.pack("ii", 1, pid)),
        "F_SETSIG": lambda: fcntl.fcntl(pipe_end, 10, 9),
        "F_SETLEASE": lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
        "FIOSETOWN": lambda: fcntl.ioctl(descriptor, 0x8901, pid_bytes),
        "FIOSETOWN with a high bit": lambda: call_kernel(
            numbers["ioctl"], descriptor, _HIGH_BIT | 0x8901, 0
        ),
        "SIOCSPGRP": lambda: fcntl.ioctl(descriptor, 0x8902, pid_bytes),
        "TIOCSTI": lambda: fcntl.ioctl(descriptor, 0x5412, b"x"),
        "TIOCLINUX": lambda: fcntl.ioctl(descriptor, 0x541C, b"x"),
        "FS_IOC_SETFLAGS": lambda: fcntl.ioctl(file, 0x4008_6602, bytes(8)),
        "FS_IOC_FSSETXATTR": lambda: fcntl.ioctl(file, 0x401C_5820, bytes(28)),
        "quotactl_fd": lambda: call_kernel(443, descriptor, 0, 0, 0),
        "process_mrelease": lambda: call_kernel(448, descriptor, 0),
        "open_tree_attr": lambda: call_kernel(467, -1, 0, 0, 0, 0),
        "io_uring_setup": lambda: call_kernel(425, 1, 0),
        "process_madvise": lambda: call_kernel(440, descriptor, 0, 0, 0, 0),
        "pidfd_send_signal": lambda: call_kernel(424, -1, 0, 0, 0),
        "file_setattr": lambda: call_kernel(469, -1, 0, 0, 0, 0),
        "socket": lambda: socket.socket(socket.AF_INET).close(),
        "F_GETOWN": lambda: fcntl.fcntl(pipe_end, fcntl.F_GETOWN),
        "F_SETFL": lambda: fcntl.fcntl(pipe_end, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC),
        "F_SETFD": lambda: os.set_inheritable(pipe_end, True),
        "F_DUPFD": lambda: os.close(os.dup(pipe_end)),
        "FIONREAD": lambda: fcntl.ioctl(pipe_end, 0x541B, bytes(4)),
        "FIONBIO": lambda: os.set_blocking(descriptor, False),
        "lock": lambda: fcntl.lockf(file, fcntl.LOCK_EX),
    }
    give_up_privileges()
    refuse_system_calls(shares_processes=mode != "own", computes_only=mode == "computing")
    outcomes = {}
    for name, call in calls.items():
        try:
            call()
        except OSError as error:
            outcomes[name] = errno.errorcode[error.errno or 0]
        else:
            outcomes[name] = "done"
    return outcomes


if __name__ == "__main__":
    json.dump(main(int(sys.argv[1]), sys.argv[2]), sys.stdout)
