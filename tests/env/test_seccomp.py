"""The filter of system calls refuses commands by their arguments."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or platform.machine() not in {"x86_64", "aarch64"},
        reason="the filter needs Linux on x86-64 or ARM64",
    ),
]
MODES = ("shared", "own", "computing")
REFUSED_CALLS = [
    *("F_SETOWN", "F_SETOWN of a group", "F_SETOWN of a socket", "F_SETOWN with a high bit"),
    *("F_SETOWN_EX", "F_SETSIG", "F_SETLEASE", "FIOSETOWN", "FIOSETOWN with a high bit"),
    *("SIOCSPGRP", "TIOCSTI", "TIOCLINUX", "quotactl_fd", "process_mrelease", "open_tree_attr"),
    *("io_uring_setup", "process_madvise"),
]
NON_COMPUTING_CALLS = [
    *("FS_IOC_SETFLAGS", "FS_IOC_FSSETXATTR", "pidfd_send_signal", "file_setattr", "socket"),
]
ALLOWED_CALLS = ["F_GETOWN", "F_SETFL", "F_SETFD", "F_DUPFD", "FIONREAD", "FIONBIO", "lock"]


def try_calls(mode: str) -> dict[str, str]:
    program = str(Path(__file__).with_name("refused_calls.py"))
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as attacked_process:
        command = [sys.executable, program, str(attacked_process.pid), mode]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300)
        is_alive = attacked_process.poll() is None
        attacked_process.kill()
    assert is_alive, "the program has ended another process"
    assert process.returncode == 0, process.stderr
    outcomes: dict[str, str] = json.loads(process.stdout)
    return outcomes


@pytest.mark.parametrize("mode", MODES)
def test_refused_calls_fail_and_allowed_calls_succeed(mode: str) -> None:
    outcomes = try_calls(mode)
    assert {name for name in REFUSED_CALLS if outcomes[name] != "EPERM"} == set()
    assert {name for name in ALLOWED_CALLS if outcomes[name] != "done"} == set()
    refused_names = {name for name in NON_COMPUTING_CALLS if outcomes[name] == "EPERM"}
    if mode == "computing":
        assert refused_names == set(NON_COMPUTING_CALLS)
    else:
        assert "socket" not in refused_names
