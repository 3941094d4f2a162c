"""Programs and workers end no other process, although Landlock has no rules for signals here."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coding_env import CodeAction, CodingEnv
from coding_env.problems import write_solution
from ludus.env.client import AsyncEnvClient
from ludus.proto.errors import EnvError
from tests.attack.attacked import AttackedProcess, make_cases, serve_env_with_launcher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or platform.machine() != "x86_64",
        reason="the attacks call the kernel of Linux on x86-64",
    ),
]

OLD_KERNEL = [sys.executable, str(Path(__file__).with_name("old_kernel.py"))]
_TOOLS = """
import ctypes, fcntl, mmap, os, struct, time
PID = {pid}
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    pointers = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    if libc.syscall(ctypes.c_long(number), *pointers) < 0:
        raise OSError(ctypes.get_errno(), 'refused')

def run(code):
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(code)
    function = ctypes.CFUNCTYPE(ctypes.c_int)
    result = function(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
    if result < 0:
        raise OSError(-result, 'refused')

def call_32_bit(number, *arguments):
    loads = zip((b'\\xbb', b'\\xb9', b'\\xba'), arguments)
    values = b''.join(code + struct.pack('i', value) for code, value in loads)
    run(b'\\x53' + values + b'\\xb8' + struct.pack('i', number) + b'\\xcd\\x80\\x5b\\xc3')

def try_all(function, values):
    for value in values:
        try:
            return function(value)
        except OSError:
            pass
    raise OSError('all refused')

def open_pipe():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return reader, writer

"""
_SIGNAL_BY_PIPE = """
reader, writer = open_pipe()
{set_owner}
fcntl.fcntl(reader, {set_signal}, 9)
fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(writer, b'x')
"""
_SIGNAL_INFO = "struct.pack('iiiii108x', 9, 0, -1, 0, os.getpid())"


def signal_by_pipe(set_owner: str, set_signal: int = 10) -> str:
    """Return code that makes a process the owner of a pipe, which then sends signal 9."""
    return _SIGNAL_BY_PIPE.format(set_owner=set_owner, set_signal=set_signal)


ATTACKS = {
    "owner of a pipe": signal_by_pipe("fcntl.fcntl(reader, fcntl.F_SETOWN, PID)"),
    "owner of a pipe, set twice": signal_by_pipe(
        "try: call(72, reader, 8, PID)\nexcept OSError: call(72, reader, 1 << 40 | 8, PID)"
    ),
    "group as the owner of a pipe": signal_by_pipe(
        "call(72, reader, 15, struct.pack('ii', 2, PID))"
    ),
    "thread as the owner of a pipe": signal_by_pipe(
        "call(72, reader, 15, struct.pack('ii', 0, PID))"
    ),
    "owner of a copy": signal_by_pipe("reader = os.dup(reader)\nfcntl.fcntl(reader, 8, PID)"),
    "owner of any descriptor": "try_all(lambda n: fcntl.fcntl(n, fcntl.F_SETOWN, PID), range(64))",
    "one of many owners": "try_all(lambda n: call(72, 1, 8, PID + n), range(-64, 64))",
    "one of many commands": "try_all(lambda n: call(72, 1, 8 | n << 32, PID), range(-64, 64))",
    "owner by a 32-bit call": signal_by_pipe("call_32_bit(55, reader, 8, PID)"),
    "owner by a 32-bit call of 64 bits": signal_by_pipe("call_32_bit(221, reader, 8, PID)"),
    "owner by an x32 call": signal_by_pipe("call(0x40000000 | 72, reader, 8, PID)"),
    "owner by an x32 command": signal_by_pipe(
        "call(0x40000000 | 514, reader, 0x8901, struct.pack('i', PID))"
    ),
    "owner by a command with a sign": signal_by_pipe(
        "call(16, reader, -(1 << 32) | 0x8901, struct.pack('i', PID))"
    ),
    "owner of an event": (
        "event = libc.eventfd(0, 0)\n"
        "try_all(lambda n: call(16, event, n, struct.pack('i', PID)), (0x8901, 0x8902, 0x5452))"
    ),
    "notice of a folder": (
        "folder = os.open('/usr/lib', os.O_RDONLY)\nfcntl.fcntl(folder, fcntl.F_SETOWN, PID)\n"
        "fcntl.fcntl(folder, fcntl.F_NOTIFY, 0x80000003)"
    ),
    "lease": "fcntl.fcntl(os.open('/etc/passwd', 0), fcntl.F_SETLEASE, 0)",
    "kill by a 32-bit call": "call_32_bit(37, PID, 9)",
    "kill by an x32 call": "call(0x40000000 | 62, PID, 9)",
    "queued signal": f"call(129, PID, 9, {_SIGNAL_INFO})",
    "queued signal of a thread": f"call(297, PID, PID, 9, {_SIGNAL_INFO})",
    "queued signal by an x32 call": f"call(0x40000000 | 524, PID, 9, {_SIGNAL_INFO})",
    "signal of a thread": "call(200, PID, 9)",
    "signal of a thread of a process": "call(234, PID, PID, 9)",
    "signal of every process": "os.kill(-1, 23)",
    "signal of a group": "os.kill(-PID, 9)",
    "signal by a process descriptor": "call(424, os.pidfd_open(PID), 9, 0, 0)",
    "descriptor of a process": "call(438, os.pidfd_open(PID), 1, 0)",
    "timer of another thread": ("call(222, 1, struct.pack('qiii44x', 0, 9, 4, PID), bytes(8))"),
    "limit of processor time": "call(302, PID, 0, struct.pack('QQ', 0, 0), bytes(16))",
    "limit by an x32 call": "call(0x40000000 | 302, PID, 0, struct.pack('QQ', 0, 0), bytes(16))",
    "queue of messages": "call(240, b'queue', 0o102, 0o600, 0)",
    "ring of calls": "call(425, 8, bytes(120))",
    "ring of calls by a 32-bit call": "call_32_bit(425, 8, 0)",
    "trace": "call(101, 0x4206, PID, 0, 0)",
    "end of memory": "call(448, os.pidfd_open(PID), 0)",
    "terminal": (
        "commands = (0x540E, 0x5410, 0x40045436, 0x5412, 0x5437)\n"
        "try_all(lambda n: call(16, 1, n, struct.pack('i', PID)), commands)"
    ),
    "new terminal": "call(16, os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY), 0x40045436, 9)",
    "group of processes": "call(109, PID, os.getpgrp())",
    "end of a group of tasks": "open('/sys/fs/cgroup/cgroup.procs', 'w')",
    "end by a key": "open('/proc/sysrq-trigger', 'w')",
    "end when memory runs out": "open(f'/proc/{PID}/oom_score_adj', 'w')",
    "child with a signal at its end": (
        "if libc.syscall(56, 0x8000 | 9, 0, 0, 0, 0) == 0: os._exit(0)\nraise OSError"
    ),
}
"""Code that tries to end process PID. It raises an error unless it has succeeded."""


@pytest.fixture(scope="module")
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Process that must survive, the leader of its group."""
    process = subprocess.Popen(["sleep", "6000"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def serve_on_old_kernel(folder: Path, target: str, isolation: str) -> Iterator[AttackedProcess]:
    arguments = ["--isolation", isolation]
    if isolation == "process":
        arguments += ["--accept-missing", "signal-scope"]
    with serve_env_with_launcher(OLD_KERNEL, folder, target, *arguments) as attacked:
        yield attacked


@pytest.fixture(
    scope="module", params=["inline", pytest.param("process", marks=pytest.mark.attack)]
)
def coding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AttackedProcess]:
    folder = tmp_path_factory.mktemp("coding") / "empty"
    yield from serve_on_old_kernel(folder, "coding_env", request.param)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProcess]:
    folder = tmp_path_factory.mktemp("workers") / "empty"
    yield from serve_on_old_kernel(folder, "hostile_env:HostileEnv", "process")


@pytest.mark.parametrize("attack", make_cases(ATTACKS, 3))
def test_program_ends_no_other_process(
    coding: AttackedProcess, bystander: subprocess.Popen[bytes], attack: str
) -> None:
    lines = "".join(f"    {line}\n" for line in attack.strip().splitlines())
    for target in (str(bystander.pid), str(coding.process.pid), "os.getppid()"):
        code = _TOOLS.replace("{pid}", target) + f"def solve(x):\n{lines}    return 'got through'\n"
        with CodingEnv(base_url=coding.http) as env:
            env.reset(seed=1)
            result = env.step(CodeAction(code=code))
            assert result.reward == 0.0
            assert "got through" not in result.observation.feedback
            observation = env.reset(seed=2).observation
            solution = write_solution(observation.problem, observation.parameters)
            assert env.step(CodeAction(code=solution)).reward == 1.0
        assert coding.is_alive
        assert bystander.poll() is None


@pytest.mark.attack
@pytest.mark.parametrize("attack", make_cases(ATTACKS, len(ATTACKS)))
async def test_worker_ends_no_other_process(
    workers: AttackedProcess, bystander: subprocess.Popen[bytes], attack: str
) -> None:
    async with await AsyncEnvClient.connect(workers.grpc) as client:
        other, _ = await client.open(seed=1)
        for target in (bystander.pid, workers.process.pid):
            session, _ = await client.open(seed=2)
            code = _TOOLS.replace("{pid}", str(target)) + attack
            with contextlib.suppress(EnvError):
                await session.step({"code": code})
            assert (await other.step({"code": "text = 'alive'"})).observation["text"] == "alive"
            assert workers.is_alive
            assert bystander.poll() is None
