"""A filter of system calls that environments do not need and that could break the sandbox.

It refuses calls that inspect other processes, make namespaces, mount, load code into the
kernel, or reach large and rarely used parts of it. It also refuses commands that let a descriptor
send signals, which the kernel checks less strictly than `kill`. If process ids are shared, the
filter also refuses calls that change limits and priorities of other processes, and memory that
outlives its process. A refused call fails with EPERM, as for a process without privileges.
"""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from ludus.env.sandbox import kernel
from ludus.env.sandbox.kernel import LayerUnavailableError

_SECCOMP_MODE_FILTER = 2
_ALLOW, _FAIL, _KILL_PROCESS = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_Code: TypeAlias = tuple[int, int, int, int]
_NOT_PERMITTED: _Code = (_RETURN, 0, 0, _FAIL | errno.EPERM)
_JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST = 0x15, 0x35
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET, _ARGUMENT_BYTES = 0, 4, 16, 8
_FIRST_X32_NUMBER = 0x4000_0000
_NAMESPACE_FLAGS = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
_REFUSED_SINCE_5_1 = {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427},
    **{"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432},
    **{"fspick": 433, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442},
    **{"quotactl_fd": 443, "process_mrelease": 448, "open_tree_attr": 467},
}
"""Call numbers. Calls added since Linux 5.1 have the same number on every architecture."""
_CLONE3 = 435
_NON_COMPUTING_SINCE_5_1 = {
    **{"pidfd_send_signal": 424, "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466},
    **{"file_setattr": 469},
}
_REFUSED_FCNTL_COMMANDS = {"F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15, "F_SETLEASE": 1024}
"""Commands that send any signal to any process, and leases, which block a file's other users."""
_REFUSED_IOCTL_COMMANDS = {
    "FIOSETOWN": 0x8901,
    "SIOCSPGRP": 0x8902,
    "TIOCSTI": 0x5412,
    "TIOCLINUX": 0x541C,
}
"""Commands that do the same as F_SETOWN, or type into the server's terminal."""
_NON_COMPUTING_IOCTL_COMMANDS = {"FS_IOC_SETFLAGS": 0x4008_6602, "FS_IOC_FSSETXATTR": 0x401C_5820}
"""Commands that change the attributes of a file."""
_LOCAL_FAMILIES = (1,)
_NETWORK_FAMILIES = (1, 2, 10, 16)
"""Local, IPv4, IPv6, and netlink (for address look-ups): all respect network namespaces."""
_OWN_PROCESS_ARGUMENTS = {
    **{"prlimit64": (0,), "setpriority": (0, 0), "ioprio_set": (1, 0), "sched_setparam": (0,)},
    **{"sched_setscheduler": (0,), "sched_setaffinity": (0,), "sched_setattr": (0,)},
}
"""First arguments that make a call affect only its own process.

Limits of CPU time are included because they kill a process as a signal does.
"""


@dataclass(frozen=True, slots=True)
class _Architecture:
    audit_number: int
    clone_number: int
    socket_number: int
    fcntl_number: int
    ioctl_number: int
    refused_calls: dict[str, int]
    shared_memory_calls: dict[str, int]
    """Refused if process ids are shared: memory and queues that outlive their process."""
    own_process_calls: dict[str, int]
    """Refused if process ids are shared, except with `_OWN_PROCESS_ARGUMENTS`."""
    non_computing_calls: dict[str, int]
    """Refused to a program that only computes.

    These are processes, threads, signals, sockets, limits that root could raise again, and the
    metadata of files, which Landlock does not protect.
    """


_ARCHITECTURES = {
    "x86_64": _Architecture(
        0xC000_003E,
        56,
        41,
        72,
        16,
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
        {"shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240},
        {
            **{"setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144},
            **{"sched_setaffinity": 203, "ioprio_set": 251, "prlimit64": 302, "sched_setattr": 314},
        },
        {
            **{"socket": 41, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "execve": 59},
            **{"kill": 62, "rt_sigqueueinfo": 129, "setrlimit": 160, "tkill": 200, "tgkill": 234},
            **{"rt_tgsigqueueinfo": 297, "prlimit64": 302, "execveat": 322},
            **{"chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "utime": 132},
            **{"setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197},
            **{"lremovexattr": 198, "fremovexattr": 199, "utimes": 235, "fchownat": 260},
            **{"futimesat": 261, "fchmodat": 268, "utimensat": 280},
        },
    ),
    "aarch64": _Architecture(
        0xC000_00B7,
        220,
        198,
        25,
        29,
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
        {"mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194},
        {
            **{"ioprio_set": 30, "sched_setparam": 118, "sched_setscheduler": 119},
            **{"sched_setaffinity": 122, "setpriority": 140, "prlimit64": 261},
            **{"sched_setattr": 274},
        },
        {
            **{"kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138},
            **{"setrlimit": 164, "socket": 198, "socketpair": 199, "clone": 220, "execve": 221},
            **{"rt_tgsigqueueinfo": 240, "prlimit64": 261, "execveat": 281},
            **{"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "fchmod": 52},
            **{"lremovexattr": 15, "fremovexattr": 16, "fchmodat": 53, "fchownat": 54},
            **{"fchown": 55, "utimensat": 88},
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


def refuse_system_calls(
    *,
    shares_processes: bool = True,
    without_sockets: bool = False,
    computes_only: bool = False,
) -> None:
    """Install the filter, for this process and its descendants.

    Args:
        shares_processes: True if other workers have the same process ids and shared memory.
        without_sockets: True if the process needs no sockets except local ones.
        computes_only: True if the process needs no child processes, threads, signals and
            sockets, and changes no file's mode, owner, times or attributes.

    Raises:
        LayerUnavailableError: the filter does not support this architecture.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None:
        supported = f"the filter supports {' and '.join(_ARCHITECTURES)}"
        raise LayerUnavailableError(f"{supported}, and this machine is {platform.machine()}")
    families = _LOCAL_FAMILIES if without_sockets else _NETWORK_FAMILIES
    program = _build_program(architecture, shares_processes, families, computes_only)
    instructions = (_Instruction * len(program))(*(_Instruction(*code) for code in program))
    filter_program = _Program(len(program), instructions)
    kernel.prctl(kernel.PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program))


def _build_program(
    architecture: _Architecture,
    shares_processes: bool,
    families: tuple[int, ...],
    computes_only: bool,
) -> list[_Code]:
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, architecture.audit_number),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_IF_AT_LEAST, 0, 1, _FIRST_X32_NUMBER),
        _NOT_PERMITTED,
        (_JUMP_IF_EQUAL, 0, 1, _CLONE3),
        # A filter cannot read the flags of clone3. Without clone3 the C library uses clone.
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    refused_calls = architecture.refused_calls | _REFUSED_SINCE_5_1
    if shares_processes:
        refused_calls |= architecture.shared_memory_calls
        for name, call_number in architecture.own_process_calls.items():
            program += _refuse_unless_arguments(call_number, _OWN_PROCESS_ARGUMENTS[name])
    if computes_only:
        refused_calls |= architecture.non_computing_calls | _NON_COMPUTING_SINCE_5_1
    ioctl_commands = dict(_REFUSED_IOCTL_COMMANDS)
    if computes_only:
        ioctl_commands |= _NON_COMPUTING_IOCTL_COMMANDS
    program += _refuse_commands(architecture.fcntl_number, _REFUSED_FCNTL_COMMANDS.values())
    program += _refuse_commands(architecture.ioctl_number, ioctl_commands.values())
    for call_number in refused_calls.values():
        program += [(_JUMP_IF_EQUAL, 0, 1, call_number), _NOT_PERMITTED]
    return [
        *program,
        *_refuse_other_families(architecture.socket_number, families),
        (_JUMP_IF_EQUAL, 0, 4, architecture.clone_number),
        (_LOAD, 0, 0, _ARGUMENTS_OFFSET),
        (_AND, 0, 0, _NAMESPACE_FLAGS),
        (_JUMP_IF_EQUAL, 1, 0, 0),
        _NOT_PERMITTED,
        (_RETURN, 0, 0, _ALLOW),
    ]


def _refuse_unless_arguments(call_number: int, allowed_arguments: tuple[int, ...]) -> list[_Code]:
    checks: list[_Code] = []
    for index, allowed_argument in enumerate(allowed_arguments):
        num_skipped = 2 * (len(allowed_arguments) - index) - 2
        checks += [
            (_LOAD, 0, 0, _ARGUMENTS_OFFSET + index * _ARGUMENT_BYTES),
            (_JUMP_IF_EQUAL, 0 if num_skipped else 1, num_skipped, allowed_argument),
        ]
    checks += [_NOT_PERMITTED, (_RETURN, 0, 0, _ALLOW)]
    return [(_JUMP_IF_EQUAL, 0, len(checks), call_number), *checks]


def _refuse_commands(call_number: int, commands: Collection[int]) -> list[_Code]:
    """Refuse a call if its second argument is one of the commands."""
    checks: list[_Code] = [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + _ARGUMENT_BYTES)]
    checks += [
        (_JUMP_IF_EQUAL, len(commands) - index, 0, command)
        for index, command in enumerate(commands)
    ]
    checks += [(_RETURN, 0, 0, _ALLOW), _NOT_PERMITTED]
    return [(_JUMP_IF_EQUAL, 0, len(checks), call_number), *checks]


def _refuse_other_families(call_number: int, families: tuple[int, ...]) -> list[_Code]:
    family_checks = [
        (_JUMP_IF_EQUAL, len(families) - index, 0, family) for index, family in enumerate(families)
    ]
    checks = [(_LOAD, 0, 0, _ARGUMENTS_OFFSET), *family_checks]
    checks += [(_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return [(_JUMP_IF_EQUAL, 0, len(checks), call_number), *checks]
