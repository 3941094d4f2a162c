"""A filter that refuses system calls which no environment needs and escapes begin with.

What would look into other processes, make namespaces, mount, load code into the kernel, or
reach large parts of it that few use. Refused calls fail with EPERM, as they do for whoever
lacks the privilege.
"""

from __future__ import annotations

import ctypes
import errno
import platform
from dataclasses import dataclass

from ludus.env.sandbox import kernel
from ludus.env.sandbox.kernel import NotOfferedError

_SECCOMP_MODE_FILTER = 2
_ALLOW, _FAIL, _KILL_PROCESS = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST = 0x15, 0x35
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32_NUMBERS_FROM = 0x4000_0000
_NAMESPACE_FLAGS = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
_SINCE_5_1 = {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427},
    **{"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432},
    **{"fspick": 433, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442},
}
"""The same number on every architecture, as are all later calls."""
_CLONE3 = 435


@dataclass(frozen=True, slots=True)
class _Architecture:
    audit_number: int
    clone: int
    refused: dict[str, int]


_ARCHITECTURES = {
    "x86_64": _Architecture(
        0xC000_003E,
        56,
        {
            **{"ptrace": 101, "syslog": 103, "vhangup": 153, "pivot_root": 155, "adjtimex": 159},
            **{"chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166},
            **{"swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "iopl": 172},
            **{"setdomainname": 171, "ioperm": 173, "init_module": 175, "delete_module": 176},
            **{"quotactl": 179, "clock_settime": 227, "kexec_load": 246, "add_key": 248},
            **{"request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272},
            **{"move_pages": 279, "perf_event_open": 298, "fanotify_init": 300},
            **{"open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308},
            **{"process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312},
            **{"finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323},
        },
    ),
    "aarch64": _Architecture(
        0xC000_00B7,
        220,
        {
            **{"umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58},
            **{"quotactl": 60, "acct": 89, "unshare": 97, "kexec_load": 104, "init_module": 105},
            **{"delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117},
            **{"reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170},
            **{"adjtimex": 171, "add_key": 217, "request_key": 218, "keyctl": 219},
            **{"swapon": 224, "swapoff": 225, "migrate_pages": 238, "move_pages": 239},
            **{"perf_event_open": 241, "fanotify_init": 262, "open_by_handle_at": 265},
            **{"clock_adjtime": 266, "setns": 268, "process_vm_readv": 270},
            **{"process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280},
            **{"userfaultfd": 282, "kexec_file_load": 294},
        },
    ),
}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(_Instruction)))


def refuse_system_calls() -> None:
    """Install the filter, for this process and for whatever it starts.

    Raises:
        NotOfferedError: it is not written for this architecture.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None:
        known = " and ".join(_ARCHITECTURES)
        raise NotOfferedError(f"there is a filter for {known}, and this is {platform.machine()}")
    program = _program(architecture)
    instructions = (_Instruction * len(program))(*(_Instruction(*one) for one in program))
    filter_ = _Program(len(program), instructions)
    kernel.prctl(kernel.PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_))


def _program(architecture: _Architecture) -> list[tuple[int, int, int, int]]:
    not_permitted = (_RETURN, 0, 0, _FAIL | errno.EPERM)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, architecture.audit_number),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_AT_LEAST, 0, 1, _X32_NUMBERS_FROM),
        not_permitted,
        (_JUMP_IF_EQUAL, 0, 1, _CLONE3),
        # Its flags cannot be seen by a filter. The C library takes clone where there is none.
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for number in (architecture.refused | _SINCE_5_1).values():
        program += [(_JUMP_IF_EQUAL, 0, 1, number), not_permitted]
    return [
        *program,
        (_JUMP_IF_EQUAL, 0, 4, architecture.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_AND, 0, 0, _NAMESPACE_FLAGS),
        (_JUMP_IF_EQUAL, 1, 0, 0),
        not_permitted,
        (_RETURN, 0, 0, _ALLOW),
    ]
