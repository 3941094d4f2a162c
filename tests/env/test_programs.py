"""Programs of a `ProgramHost`: output, sandbox, and termination of all processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from ludus.env.programs.client import MAX_OUTPUT_BYTES, CompletedProgram, Confinement, ProgramHost
from ludus.proto.errors import UnavailableError

pytestmark = pytest.mark.slow

VARIABLES = {"PATH": os.environ["PATH"], "SHOWN": "this"}


@pytest_asyncio.fixture(params=["offered", "off"])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[ProgramHost]:
    async with ProgramHost(request.param) as host:
        yield host


async def run(host: ProgramHost, script: str, *readable_paths: str) -> CompletedProgram:
    return await host.run(
        ["/bin/sh", "-c", script], variables=VARIABLES, folder="/", readable_paths=readable_paths
    )


def list_running_commands() -> list[list[str]]:
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


async def test_output_and_exit_code_are_returned(host: ProgramHost) -> None:
    result = await run(host, 'echo "$SHOWN" "$SECRET"; echo why >&2; exit 3')
    assert (result.exit_code, result.output, result.errors) == (3, "this \n", "why\n")
    killed_result = await run(host, "kill -9 $$")
    assert killed_result.exit_code == -9


async def test_concurrent_outputs_stay_separate_and_long_output_is_limited(
    host: ProgramHost,
) -> None:
    results = await asyncio.gather(*(run(host, f"echo {index}") for index in range(24)))
    assert [result.output for result in results] == [f"{index}\n" for index in range(24)]
    long_result = await run(host, "yes | head -c 3000000; echo end")
    assert len(long_result.output) == MAX_OUTPUT_BYTES and long_result.output.endswith("y\nend\n")


async def test_program_folder_is_removed_when_the_program_ends(host: ProgramHost) -> None:
    result, other_result = [
        await run(host, 'echo "$HOME"; echo kept > "$HOME/file"; cat "$HOME"/*') for _ in range(2)
    ]
    assert result.output != other_result.output and result.output.endswith("kept\n")
    assert not Path(result.output.splitlines()[0]).exists()


async def test_descendants_end_with_the_program(host: ProgramHost) -> None:
    program = await asyncio.wait_for(run(host, "(setsid sleep 31337 &) ; sleep 31337 & exit 0"), 20)
    assert program.exit_code == 0
    assert not [command for command in list_running_commands() if "31337" in command]


async def test_cancelled_call_kills_the_program(host: ProgramHost) -> None:
    run_task = asyncio.ensure_future(run(host, "(setsid sleep 31338 &) ; sleep 31338"))
    while sum("31338" in command for command in list_running_commands()) < 2:
        await asyncio.sleep(0.05)
    run_task.cancel()
    await asyncio.wait([run_task])
    for _ in range(100):
        if not [command for command in list_running_commands() if "31338" in command]:
            return
        await asyncio.sleep(0.05)
    pytest.fail("a process outlived the cancelled call")


async def test_programs_end_when_the_calling_process_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        "import asyncio, os\n"
        "from ludus.env.programs.client import ProgramHost\n"
        "async def main():\n"
        "    async with ProgramHost() as host:\n"
        "        await host.run(['sleep', '31339'], variables=dict(os.environ), folder='/')\n"
        "asyncio.run(main())\n"
    )
    caller = await asyncio.create_subprocess_exec(sys.executable, str(script))
    while ["sleep", "31339"] not in list_running_commands():
        await asyncio.sleep(0.05)
    caller.kill()
    await caller.wait()
    for _ in range(100):
        if ["sleep", "31339"] not in list_running_commands():
            return
        await asyncio.sleep(0.05)
    pytest.fail("the program outlived the process that started it")


async def test_failed_starts_and_a_dead_launcher_are_reported(
    host: ProgramHost,
) -> None:
    program = await host.run(["/no/such/program"], variables=VARIABLES, folder="/")
    assert program.exit_code == 127
    assert "/no/such/program cannot be started" in program.errors
    assert host.launcher is not None
    host.launcher.kill()
    host.launcher.wait()
    with pytest.raises(UnavailableError, match="launcher"):
        await run(host, "true")


@pytest.mark.parametrize("confinement", ["offered"])
async def test_program_reads_only_allowed_paths(confinement: Confinement, tmp_path: Path) -> None:
    (tmp_path / "allowed").write_text("allowed\n")
    (tmp_path / "private").write_text("secret\n")
    async with ProgramHost(confinement) as host:
        script = f"cat {tmp_path}/allowed; cat {tmp_path}/private; echo no > {tmp_path}/allowed"
        program = await run(host, script, str(tmp_path / "allowed"))
    if "secret" in program.output:
        pytest.skip("this machine has no Landlock")
    assert program.output == "allowed\n"
    assert (tmp_path / "allowed").read_text() == "allowed\n"
