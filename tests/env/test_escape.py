"""Code in a worker, such as code that a model wrote, cannot escape the sandbox."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.sandbox.confine import Layer, Sandbox
from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.landlock import require_signal_scope
from ludus.env.serving.server import EnvServer
from ludus.env.workers.describe import require_layers
from ludus.proto.errors import ConfigError, SessionLostError
from tests.env.code_env import CodeEnv
from tests.env.polling import wait_until
from tests.env.processes import is_alive, list_child_pids, list_pids, read_command_line
from tests.env.served import ServerProcess, serve, start_server_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux"),
]

PROGRAM_PATH = str(Path(__file__).with_name("code_env.py"))
SECRETS = {
    "LUDUS_SESSION_KEY": "the-fleets-key-" + "k" * 32,
    "LUDUS_ENV_TOKEN": "the-servers-token-" + "t" * 32,
    "LUDUS_GATEWAY_TOKEN": "the-gateways-token-" + "g" * 32,
    "TEAM_A_TOKEN": "a-tenants-token-" + "a" * 32,
    "AWS_SECRET_ACCESS_KEY": "a-clouds-key-" + "c" * 32,
}
DENIED_ERRORS = {"PermissionError", "FileNotFoundError", "ProcessLookupError"}


@dataclass
class Target:
    """The attacked server, and a secret file outside the sandbox."""

    server: ServerProcess
    secret_file: Path

    @property
    def pid(self) -> int:
        return self.server.process.pid

    @property
    def fork_server_pid(self) -> int:
        (pid,) = (
            child_pid
            for child_pid in list_child_pids(self.pid)
            if "forkserver" in read_command_line(child_pid)
        )
        return pid


@pytest.fixture(scope="module", params=["pool", "process", "restricted"])
def target(request, tmp_path_factory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("target")
    secret_file = folder / "operator.token"
    secret_file.write_text("an-operators-token")
    secret_file.chmod(0o644)
    arguments = ["--no-determinism-check", "--max-sessions", "8"]
    match request.param:
        case "pool":
            arguments += ["--isolation", "pool", "--num-workers", "2"]
        case "process":
            arguments += ["--isolation", "process"]
        case "restricted":
            skip_without_signal_scope()
            arguments += ["--isolation", "pool", "--num-workers", "2", "--restricted"]
    with start_server_process(folder, *arguments, module=PROGRAM_PATH, env=SECRETS) as server:
        yield Target(server, secret_file)


def skip_without_signal_scope() -> None:
    """Skip the test if the machine cannot confine signals without namespaces."""
    try:
        require_signal_scope()
    except LayerUnavailableError as error:
        pytest.skip(str(error))


async def run(session: Any, code: str, **values: Any) -> dict[str, Any]:
    """Run code in a session's worker and return the report of the step."""
    assignments = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    code = f"import os\n{assignments}\n{textwrap.dedent(code)}"
    return (await session.step({"code": code})).info


async def run_and_get_result(session: Any, code: str, **values: Any) -> Any:
    report = await run(session, code, **values)
    assert "result" in report, report
    return report["result"]


@asynccontextmanager
async def connect_to(target: Target | EnvServer) -> AsyncIterator[AsyncEnvClient]:
    is_process = isinstance(target, Target)
    address = target.server.grpc_address if is_process else target.grpc_address
    token = SECRETS["LUDUS_ENV_TOKEN"] if is_process else None
    client = await AsyncEnvClient.connect(address, ConnectOptions(token=token))
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def open_sessions(target: Target | EnvServer, num_sessions: int) -> AsyncIterator[list[Any]]:
    async with connect_to(target) as client:
        sessions = [(await client.open())[0] for _ in range(num_sessions)]
        yield sessions
        for session in sessions:
            with contextlib.suppress(SessionLostError):
                await session.close()


@asynccontextmanager
async def open_session(target: Target | EnvServer) -> AsyncIterator[Any]:
    async with open_sessions(target, 1) as (session,):
        yield session


async def get_worker_pid(session: Any) -> int:
    return int(await run_and_get_result(session, "result = os.environ['LUDUS_WORKER_PID']"))


# -- secrets ---------------------------------------------------------------------------


async def test_environment_variables_of_other_processes_cannot_be_read(target) -> None:
    code = """
        def variables(pid):
            try:
                return open(f"/proc/{pid}/environ", errors="replace").read()
            except OSError:
                return ""

        result = "\\n".join(map(variables, [*os.listdir("/proc"), *other_pids]))
    """
    async with open_session(target) as session:
        other_pids = [target.pid, target.fork_server_pid, os.getpid(), 1]
        variables = await run_and_get_result(session, code, other_pids=other_pids)
        variables += str(await run_and_get_result(session, "result = dict(os.environ)"))
        assert [name for name, secret in SECRETS.items() if secret in variables] == []
        assert "PATH" in variables


@pytest.mark.parametrize("entry", ["mem", "maps", "fd/1", "root/etc/passwd", "cwd/pyproject.toml"])
async def test_other_processes_cannot_be_inspected(target, entry) -> None:
    async with open_sessions(target, 2) as (session, peer):
        for pid in (target.pid, target.fork_server_pid, await get_worker_pid(peer), os.getpid()):
            report = await run(
                session, "result = open(path, 'rb').read(1)", path=f"/proc/{pid}/{entry}"
            )
            assert report.get("error") in DENIED_ERRORS, (pid, report)


async def test_no_process_can_be_traced(target) -> None:
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
        buffer = ctypes.create_string_buffer(8)
        span = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
        result = []
        for pid in other_pids:
            result.append(libc.ptrace(PTRACE_ATTACH, pid, 0, 0))
            result.append(libc.ptrace(PTRACE_SEIZE, pid, 0, 0))
            result.append(libc.process_vm_readv(pid, span, 1, span, 1, 0))
    """
    async with open_session(target) as session:
        other_pids = [target.pid, target.fork_server_pid, 1]
        assert set(await run_and_get_result(session, code, other_pids=other_pids)) == {-1}


# -- files -----------------------------------------------------------------------------


async def test_files_outside_the_sandbox_cannot_be_read_or_written(target) -> None:
    async with open_sessions(target, 2) as (session, peer):
        other_folder = await run_and_get_result(peer, "result = os.environ['TMPDIR']")
        own_folder = await run_and_get_result(session, "result = os.environ['TMPDIR']")
        private_paths = [str(target.secret_file), "/etc/shadow", str(Path.home() / ".bashrc")]
        if other_folder != own_folder:
            await run_and_get_result(peer, "open(os.environ['TMPDIR'] + '/own', 'w').write('x')")
            private_paths.append(f"{other_folder}/own")
        for path in private_paths:
            report = await run(session, "result = open(path).read(1)", path=path)
            assert report.get("error") in DENIED_ERRORS, (path, report)
        paths = [target.secret_file.parent / "new", Path("/tmp/new"), Path(__file__), "/etc/new"]
        for path in map(str, paths):
            report = await run(session, "result = open(path, 'a').write('x')", path=path)
            assert report.get("error") in {*DENIED_ERRORS, "OSError"}, (path, report)
        report = await run(session, "os.unlink(path)", path=str(target.secret_file))
        assert report.get("error") in {*DENIED_ERRORS, "OSError"} and target.secret_file.exists()
        report = await run(session, "os.listdir(path)", path=str(target.secret_file.parent))
        assert report.get("error") in DENIED_ERRORS


async def test_child_processes_of_a_worker_are_confined(target) -> None:
    code = """
        import subprocess
        def run(*command):
            return subprocess.run(command, capture_output=True, text=True).stdout
        result = [
            run("cat", secret),
            run("cat", f"/proc/{server}/environ"),
            run("sh", "-c", f"kill -0 {server} && echo reached"),
            run("sh", "-c", "unshare -U true && echo reached"),
            run("echo", "alive"),
        ]
    """
    async with open_session(target) as session:
        outputs = await run_and_get_result(
            session, code, secret=str(target.secret_file), server=target.pid
        )
        assert outputs == ["", "", "", "", "alive\n"]


async def test_worker_folder_is_removed_with_the_worker(target) -> None:
    code = """
        import subprocess, tempfile
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write("mine")
        os.makedirs(os.path.expanduser("~/.cache/deep"))
        subprocess.run(["sh", "-c", "echo more > $TMPDIR/more"], check=True)
        result = [open(file.name).read(), tempfile.gettempdir()]
    """
    async with open_session(target) as session:
        text, folder = await run_and_get_result(session, code)
        assert text == "mine" and Path(folder, "more").exists()
        pid = await get_worker_pid(session)
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not Path(folder).exists())


def lacks_layer(target: Target, layer: Layer) -> bool:
    """Return True if this machine does not support the layer of the sandbox."""
    headers = {"authorization": f"Bearer {SECRETS['LUDUS_ENV_TOKEN']}"}
    text = httpx.get(f"{target.server.http_address}/metrics", headers=headers, timeout=60).text
    return f'layer="{layer}"}} 0.0' in text


@pytest.mark.parametrize(
    "statement",
    [
        "os.chmod(path, 0o666)",
        "os.utime(path, (1, 1))",
        "os.setxattr(path, 'user.note', b'x')",
        "os.chown(path, -1, os.getgid())",
        "os.chmod(os.path.dirname(os.environ['TMPDIR']), 0)",
    ],
)
async def test_metadata_of_files_outside_the_sandbox_cannot_be_changed(target, statement) -> None:
    if lacks_layer(target, Layer.READ_ONLY):
        pytest.skip("this machine does not support read-only mounts")
    async with open_session(target) as session:
        report = await run(session, statement, path=str(target.secret_file))
        assert report.get("error") in {*DENIED_ERRORS, "OSError"}, report
        own_folder_code = (
            "path = os.environ['TMPDIR'] + '/own'; open(path, 'w').close(); os.chmod(path, 0o700)"
        )
        await run_and_get_result(session, f"{own_folder_code}; result = 1")


async def test_worker_inherits_only_the_connection_socket(target) -> None:
    code = """
        result = []
        for fd in range(3, 256):
            try:
                result.append(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0])
            except OSError:
                pass
    """
    async with open_session(target) as session:
        assert await run_and_get_result(session, code) == ["socket"]


async def test_shared_memory_of_a_worker_is_hidden_from_other_workers(target) -> None:
    code = """
        import ctypes
        libc = ctypes.CDLL(None)
        result = libc.shmget(0x1DD5, 4096, flags)
    """
    async with open_sessions(target, 2) as (session, peer):
        await run_and_get_result(session, code, flags=0o1600)
        assert await run_and_get_result(peer, code, flags=0) == -1


async def test_vsock_sockets_cannot_be_opened(target) -> None:
    code = "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"
    async with open_session(target) as session:
        assert (await run(session, code)).get("error") in {*DENIED_ERRORS, "OSError"}


# -- signals and children --------------------------------------------------------------


async def test_no_signal_reaches_another_process(target) -> None:
    async with open_sessions(target, 2) as (session, peer):
        other_pid, own_pid = await get_worker_pid(peer), await get_worker_pid(session)
        other_pids = {target.pid, target.fork_server_pid, os.getpid(), other_pid, os.getppid()} - {
            own_pid
        }
        for pid in other_pids:
            for number in (0, int(signal.SIGTERM)):
                report = await run(session, "os.kill(pid, number)", pid=pid, number=number)
                assert report.get("error") in DENIED_ERRORS, (pid, report)
        assert await run_and_get_result(peer, "result = 1 + 1") == 2


@pytest.mark.parametrize(
    "statement",
    [
        "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
        "os.setpriority(os.PRIO_PROCESS, pid, 19)",
        "os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))",
        "os.sched_setaffinity(pid, {0})",
    ],
)
async def test_limits_of_other_processes_cannot_be_set(target, statement) -> None:
    own_limits_code = """
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(0)
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        result = 1
    """
    async with open_sessions(target, 2) as (session, peer):
        other_pid = await get_worker_pid(peer)
        report = await run(session, f"import resource; {statement}", pid=other_pid)
        assert report.get("error") in DENIED_ERRORS, report
        await run_and_get_result(session, own_limits_code)


async def test_background_processes_end_when_the_worker_is_killed(target) -> None:
    code = """
        import subprocess
        program = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(float(61.5))"
        subprocess.run([sys.executable, "-c", program + f"  # {mark}"], check=True)
    """
    mark = f"left-behind-{os.urandom(8).hex()}"

    def list_marked_pids() -> list[int]:
        return [pid for pid in list_pids() if mark in read_command_line(pid) and is_alive(pid)]

    async with open_session(target) as session:
        await run_and_get_result(
            session, f"import sys\n{textwrap.dedent(code)}\nresult = 1", mark=mark
        )
        assert len(list_marked_pids()) == 1
        os.kill(await get_worker_pid(session), signal.SIGKILL)
        await wait_until(lambda: not list_marked_pids())


async def test_privileges_cannot_be_gained(target) -> None:
    code = """
        import subprocess
        status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
        result = dict(line.split(":\\t", 1) for line in status.splitlines())
    """
    async with open_session(target) as session:
        status = await run_and_get_result(session, code)
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        assert int(status["NoNewPrivs"]) == 1


async def test_usual_libraries_work_in_the_sandbox(target) -> None:
    code = """
        import ctypes, decimal, socket, ssl, threading, xml.dom.minidom
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as threads:
            result = sum(threads.map(abs, [1, -2, 3]))
        result += len(os.urandom(4)) + open("/dev/null", "w").write("x")
    """
    async with open_session(target) as session:
        assert await run_and_get_result(session, code) == 11


# -- operator options -----------------------------------------------------------------


def make_code_server(isolation: str = "pool", **options: Any) -> EnvServer:
    if isolation == "pool":
        options.setdefault("num_workers", 1)
    return serve(CodeEnv, isolation=isolation, **options)


async def test_allowed_paths_are_accessible(tmp_path: Path) -> None:
    notes_file, input_folder, output_folder = (
        tmp_path / name for name in ("notes.txt", "data", "results")
    )
    notes_file.write_text("by an option")
    input_folder.mkdir()
    (input_folder / "one").write_text("by a flag")
    output_folder.mkdir()
    factory = partial(CodeEnv, notes=str(notes_file))
    options = {"allow_read": (input_folder,), "allow_write": (output_folder,), "num_workers": 1}
    async with (
        serve(factory, isolation="pool", **options) as server,
        open_session(server) as session,
    ):
        code = "result = open(notes).read(), open(path).read()"
        texts = await run_and_get_result(session, code, path=str(input_folder / "one"))
        assert texts == ["by an option", "by a flag"]
        write_code = "open(path, 'w').write('kept')"
        await run_and_get_result(session, write_code, path=str(output_folder / "one"))
        assert (output_folder / "one").read_text() == "kept"
        for path in (notes_file, input_folder / "one"):
            report = await run(session, write_code, path=str(path))
            assert report.get("error") in {*DENIED_ERRORS, "OSError"}


async def test_exceeding_the_disk_limit_ends_the_worker() -> None:
    code = """
        for index in range(1024):
            open(f"{os.environ['TMPDIR']}/{index}", "wb").write(b"x" * 8192)
    """
    async with make_code_server(disk_limit_mb=4) as server, open_session(server) as session:
        with pytest.raises(SessionLostError, match=r"its limit of 4 MB \(disk_limit_mb\)"):
            async with asyncio.timeout(60):
                await run(session, code)
                while True:
                    await run(session, "result = 1")
                    await asyncio.sleep(0.01)


async def test_workers_have_a_network_unless_disabled() -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', port), 5)"
    for has_network, options in ((True, {}), (False, {"no_network": True})):
        server = make_code_server(**options)
        try:
            await server.start()
        except ConfigError as error:
            assert not has_network and re.search("need namespaces or seccomp", str(error))
            continue
        try:
            async with open_session(server) as session:
                port = int(server.http_address.rpartition(":")[2])
                report = await run(session, code, port=port)
                assert ("result" in report) is has_network
        finally:
            await server.stop()


async def test_layers_are_reported_as_metrics_and_can_be_required() -> None:
    async with make_code_server() as server:
        async with httpx.AsyncClient(base_url=server.http_address, timeout=60) as client:
            text = (await client.get("/metrics")).text
        metrics = re.findall(r'env_server_sandbox_layer\{env="code",layer="(.+)"\} (\S+)', text)
        is_active_by_layer = {name: float(value) == 1 for name, value in metrics}
    assert set(is_active_by_layer) == set(Layer)
    assert is_active_by_layer[Layer.NO_NEW_PRIVILEGES]
    missing_layers = [layer for layer, is_active in is_active_by_layer.items() if not is_active]
    strict_server = make_code_server(require_sandbox=True)
    if missing_layers:
        with pytest.raises(ConfigError, match=f"requires: {missing_layers[0]} "):
            await strict_server.start()
    else:
        async with strict_server, open_session(strict_server) as session:
            assert await run_and_get_result(session, "result = 1") == 1


def test_server_without_a_required_sandbox_exits_with_2() -> None:
    command = [sys.executable, PROGRAM_PATH, "--restricted", "--port", "0", "--isolation", "pool"]
    process = subprocess.run(
        [*command, "--require-sandbox"], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 2
    assert "require_sandbox requires: namespaces (" in process.stderr.splitlines()[-1]
    assert "user-id (" in process.stderr.splitlines()[-1]


def test_missing_required_layers_are_reported_with_the_reasons() -> None:
    missing_layer_reasons = {Layer.SECCOMP: "an odd machine", Layer.LANDLOCK: "an old kernel"}
    with pytest.raises(ConfigError) as error_info:
        require_layers(missing_layer_reasons, Sandbox("/tmp", is_required=True))
    assert "requires: seccomp (an odd machine); landlock (an old kernel)" in str(error_info.value)
    assert "--require-sandbox" in str(error_info.value)
