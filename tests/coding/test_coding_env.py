"""Programming tasks: seeds, rewards, feedback and the sandbox of programs."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import learn
import pytest

from coding_env import CodeAction, CodeObservation, CodingEnv, make_environment
from coding_env.policies import fixed_policies
from coding_env.problems import draw_task, write_solution
from coding_env.server.programs import ProgramLimits, ProgramResult, run_program
from coding_env.text import CodingRenderer
from ludus.env.check import check_environment
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import LocalEnvironment, load_run_config
from ludus.proto.errors import ActionParseError, ConfigError, EpisodeStateError, ErrorCode
from ludus.trainer.models.tiny import make_tokenizer

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the program sandbox needs Linux"
)
ROOT = Path(__file__).parents[2]
LIMITS = ProgramLimits(cpu_s=1, memory_bytes=256 << 20, output_bytes=1000)
IDENTITY_PROGRAM = "def solve(x):\n    return x\n"


def run(code: str, num_calls: int = 2, cpu_s: int = LIMITS.cpu_s) -> ProgramResult:
    """Run a program, and call its function `solve` with 0, 1, ..., `num_calls` - 1."""
    limits = replace(LIMITS, cpu_s=cpu_s)
    return run_program(code, [[number] for number in range(num_calls)], limits)


def list_values(result: ProgramResult) -> list[object]:
    return [outcome.value for outcome in result.outcomes]


def play_episode(policy: str, seed: int, **options: int) -> list[tuple[float | None, bool | None]]:
    """Play an episode with a baseline policy; return the reward and success of each step."""
    environment = make_environment(**options)
    player = fixed_policies({})[policy]
    transition = environment.reset(seed=seed)
    steps = []
    while not transition.terminated:
        action = player(transition.observation.model_dump(), random.Random(0))
        transition = environment.step(CodeAction.model_validate(action))
        steps.append((transition.reward, transition.success))
    return steps


def write_looping_program(observation: CodeObservation) -> str:
    """Return a program that passes the first test and loops forever in the second."""
    expected_value = observation.prompt.split("\n")[2].partition(" == ")[2]
    return (
        f"calls = []\ndef solve(x):\n    calls.append(x)\n    while len(calls) > 1: pass\n"
        f"    return {expected_value}\n"
    )


@pytest.mark.slow
def test_environment_follows_the_contract() -> None:
    check_environment(make_environment, seeds=range(2), num_steps=3).raise_if_failed()


@pytest.mark.slow
def test_package_is_importable_under_its_openenv_path() -> None:
    package = importlib.import_module("envs.coding_env")
    assert package.CodeAction(code="print(1)").code == "print(1)"
    assert package.CodingEnv.default_url == "http://localhost:8008"


@pytest.mark.slow
def test_seed_determines_the_task() -> None:
    tasks = [draw_task(random.Random(seed), 4) for seed in range(300)]
    assert tasks == [draw_task(random.Random(seed), 4) for seed in range(300)]
    assert len({task.problem for task in tasks}) == 8
    assert len({task.text for task in tasks}) > 100
    assert all("$" not in task.text for task in tasks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_baselines_earn_the_expected_rewards(seed: int) -> None:
    assert play_episode("solution", seed) == [(1.0, True)]
    assert play_episode("wrong", seed, max_turns=2) == [(0.0, None), (0.0, False)]


@pytest.mark.slow
def test_tests_passed_before_an_endless_loop_are_rewarded() -> None:
    environment = make_environment(max_turns=1, num_tests=4, time_limit_s=1)
    code = write_looping_program(environment.reset(seed=3).observation)
    result = environment.step(CodeAction(code=code))
    assert result.observation.tests_passed == [True, False, False, False]
    assert (result.reward, result.success) == (0.25, False)
    assert result.observation.timed_out and "took too long" in result.observation.feedback
    assert "was not reached" in result.observation.feedback
    assert (environment.state.num_passed, environment.state.last_exit_code) == (1, -9)


def test_feedback_contains_only_shown_tests() -> None:
    environment = make_environment(num_shown=1, num_tests=3)
    environment.reset(seed=1)
    result = environment.step(CodeAction(code="print('so')\ndef solve(x):\n    return [None]\n"))
    feedback = result.observation.feedback
    assert feedback.startswith("0 of 3 tests passed.") and feedback.count("expected") == 1
    assert "got [None]." in feedback and feedback.endswith("stdout:\nso")
    assert (result.reward, result.terminated) == (0.0, False)


def test_program_outside_an_episode_is_refused() -> None:
    environment = make_environment(max_turns=1, num_tests=1)
    with pytest.raises(EpisodeStateError) as error_info:
        environment.step(CodeAction(code=""))
    assert error_info.value.code == ErrorCode.NOT_RESET
    environment.reset(seed=1)
    assert environment.step(CodeAction(code="")).terminated
    with pytest.raises(EpisodeStateError) as error_info:
        environment.step(CodeAction(code=""))
    assert error_info.value.code == ErrorCode.EPISODE_OVER


def test_kinds_limit_the_tasks() -> None:
    environment = make_environment(kinds=["multiply", "add"])
    tasks = [environment.reset(seed=seed).observation for seed in range(50)]
    assert {task.problem for task in tasks} == {"multiply", "add"}
    assert all(f"and {task.parameters['k']}." in task.prompt for task in tasks)
    answers = environment.text_renderer.legal_answers(tasks[0])
    assert len(set(answers)) == 18
    assert {write_solution(task.problem, task.parameters) for task in tasks} <= set(answers)
    assert environment.options["kinds"] == ["multiply", "add"]


def test_legal_responses_are_empty_with_many_solutions() -> None:
    environment = make_environment()
    observation = environment.reset(seed=1).observation
    assert environment.text_renderer.legal_answers(observation) == []


@pytest.mark.parametrize("kind", ["add", "subtract", "multiply"])
def test_one_line_solution_requires_the_correct_number(kind: str) -> None:
    environment = make_environment(kinds=[kind], max_turns=1, num_shown=0)
    correct_number = environment.reset(seed=1).observation.parameters["k"]
    for number in (correct_number, correct_number % 9 + 1):
        environment.reset(seed=1)
        code = write_solution(kind, {"k": number})
        assert environment.step(CodeAction(code=code)).success is (number == correct_number)


@pytest.mark.slow
def test_tiny_example_allows_every_legal_response() -> None:
    config = load_run_config(ROOT / "examples" / "coding" / "tiny.toml")
    (environment_config,) = config.environments.values()
    assert isinstance(environment_config, LocalEnvironment)
    environment = make_environment(**environment_config.options)
    observation = environment.reset(seed=5).observation
    (prompt,) = environment.text_renderer.render(observation, first=True)
    answers = environment.text_renderer.legal_answers(observation)
    tokenizer = make_tokenizer([prompt["content"], *answers], 512)
    assert len(answers) == round(1 / learn.ONE_PROGRAM)
    rewards = []
    for answer in answers:
        assert len(tokenizer.encode(answer)) < config.rollout.max_completion_tokens
        environment.reset(seed=5)
        result = environment.step(environment.text_renderer.parse(answer, observation))
        rewards.append(result.reward)
        assert result.terminated
    assert sorted(rewards)[-2:] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["add", "divide"], "unknown kind 'divide'; use sum_of_multiples"),
        ([], r"at least 1 item after validation, not 0"),
        ("add", "expected a valid tuple, got 'add'"),
        ([["add"]], "expected a valid string"),
    ],
)
def test_invalid_kinds_are_refused(kinds: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"kinds.*{message}"):
        make_environment(kinds=kinds)


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"num_tests": True}, {"memory_mb": 1}])
def test_invalid_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: expected"):
        make_environment(**options)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nor better\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n", "x = 1\n"),
    ],
)
def test_last_code_block_is_the_program(text: str, code: str) -> None:
    observation = CodeObservation(prompt="", problem="", parameters={})
    assert CodingRenderer().parse(text, observation).code == code


@pytest.mark.parametrize("text", ["", " \n", "x = 1\0", "```python\n```"])
def test_text_without_code_is_invalid(text: str) -> None:
    observation = CodeObservation(prompt="", problem="", parameters={})
    with pytest.raises(ActionParseError, match="expected Python code"):
        CodingRenderer().parse(text, observation)


def test_output_errors_and_return_values_are_separate() -> None:
    result = run("print('out')\ndef solve(x):\n    return 1 // x\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "out\n", "")
    assert result.outcomes[0].error == "ZeroDivisionError: integer division or modulo by zero"
    assert result.outcomes[1].value == 1
    failure = run("def solve(x:\n")
    assert failure.exit_code == 1 and "SyntaxError" in failure.stderr and not failure.outcomes
    assert run("x = 1").outcomes[0].error == "NameError: there is no function solve"


def test_programs_do_not_affect_each_other() -> None:
    run("import builtins, math\nbuiltins.leak = math.leak = 1\nimport sys\nsys.path.clear()\n")
    result = run("import fractions, math\ndef solve(x):\n    return math.leak if x else leak\n")
    assert not any(outcome.has_returned for outcome in result.outcomes)
    assert result.outcomes[0].error.startswith("NameError")


@pytest.mark.slow
def test_killed_runner_is_restarted() -> None:
    parent_pid_code = "open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1]"
    code = f"import os\ndef solve(x):\n    pid = os.getppid()\n    return int({parent_pid_code})\n"
    result, second_result = run(code), run(code)
    assert list_values(result) == list_values(second_result)
    runner_pid = result.outcomes[0].value
    assert isinstance(runner_pid, int) and runner_pid != os.getpid()
    os.kill(runner_pid, signal.SIGKILL)
    os.waitpid(runner_pid, 0)
    third_result = run(code)
    assert runner_pid != third_result.outcomes[0].value and third_result.outcomes[0].has_returned


@pytest.mark.slow
def test_concurrent_threads_receive_separate_results() -> None:
    with ThreadPoolExecutor(8) as threads:
        codes = [f"def solve(x):\n    return {number}\n" for number in range(24)]
        results = list(threads.map(lambda code: run(code, cpu_s=60), codes))
    assert [list_values(result) for result in results] == [[number, number] for number in range(24)]


def test_program_is_deterministic() -> None:
    code = "def solve(x):\n    return list({'a', 'b', 'c', 'd', str(x)})\nprint(hash('a'))\n"
    assert run(code) == run(code)


@pytest.mark.parametrize("statement", ["import sys; sys.exit(7)\n", "import os; os._exit(7)\n"])
def test_exit_code_is_reported(statement: str) -> None:
    result = run(statement + IDENTITY_PROGRAM)
    assert (result.exit_code, result.outcomes, result.timed_out) == (7, (), False)


def test_exit_in_a_call_keeps_earlier_outcomes() -> None:
    result = run("import sys\ndef solve(x):\n    return x if x < 1 else sys.exit(0)\n", num_calls=4)
    assert (result.exit_code, list_values(result)) == (0, [0])


@pytest.mark.slow
def test_endless_loop_exceeds_the_cpu_limit() -> None:
    result = run("while True:\n    try:\n        pass\n    except BaseException:\n        pass\n")
    assert result.timed_out and result.exit_code == -9


@pytest.mark.slow
def test_sleeping_program_exceeds_the_wall_clock_limit() -> None:
    assert run("import time\ntime.sleep(600)\n").timed_out


def test_output_is_truncated_at_the_limit() -> None:
    result = run(
        "import sys\nfor f in (sys.stdout, sys.stderr): f.write('é' * 3_000_000)\n"
        + IDENTITY_PROGRAM
    )
    assert result.stdout == result.stderr == "é" * 500
    assert list_values(result) == [0, 1]


def test_memory_limit_raises_memory_error() -> None:
    result = run("def solve(x):\n    return len(bytearray(1 << 30)) if x else 0\n")
    assert result.outcomes[0].value == 0 and result.outcomes[1].error == "MemoryError"


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("while True: os.fork()", id="fork bomb"),
        pytest.param("subprocess.run(['/bin/true'])", id="program"),
        pytest.param("threading.Thread(target=print).start()", id="thread"),
        pytest.param("os.kill(os.getppid(), 9)", id="signal"),
        pytest.param("fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())", id="signal by a descriptor"),
        pytest.param("fcntl.fcntl(0, 10, 9)", id="signal of a descriptor"),
        pytest.param("fcntl.ioctl(0, 0x8901, bytes(4))", id="owner of a descriptor"),
        pytest.param("signal.pidfd_send_signal(0, 9)", id="signal by a process descriptor"),
        pytest.param("socket.socket()", id="network"),
        pytest.param("socket.socketpair()", id="pair of sockets"),
        pytest.param("resource.setrlimit(resource.RLIMIT_CPU, (99, 99))", id="limits"),
        pytest.param("open(FOLDER + '/created', 'w').write('x')", id="write"),
        pytest.param("os.remove(FOLDER + '/existing')", id="remove"),
        pytest.param("open(FOLDER + '/existing').read()", id="read"),
        pytest.param("open(f'/proc/{os.getppid()}/mem', 'rb').read(1)", id="memory of the parent"),
        pytest.param("os.chmod(FOLDER + '/existing', 0o777)", id="mode"),
        pytest.param("os.utime(FOLDER + '/existing', (1, 1))", id="times"),
        pytest.param("os.chown(FOLDER + '/existing', 1, 1)", id="owner"),
        pytest.param("os.setxattr(FOLDER + '/existing', 'user.a', b'b')", id="attributes"),
        pytest.param("import coding_env", id="code of the environment"),
        pytest.param("import pydantic", id="installed package"),
    ],
)
def test_sandbox_blocks_forbidden_operations(statement: str, tmp_path: Path) -> None:
    existing_file = tmp_path / "existing"
    existing_file.write_text("x")
    initial_status = existing_file.stat()
    imports = "import fcntl, os, resource, signal, socket, subprocess, threading\n"
    constants = f"FOLDER = {str(tmp_path)!r}\n"
    function = f"def solve(x):\n    if x: return 'alive'\n    {statement}\n    return 'done'\n"
    result = run(imports + constants + function)
    assert not result.outcomes[0].has_returned, result
    assert result.outcomes[0].error.split(":")[0] in {
        *("PermissionError", "RuntimeError", "ValueError", "OSError", "ModuleNotFoundError"),
    }
    assert result.outcomes[1].value == "alive"
    assert [path.name for path in tmp_path.iterdir()] == ["existing"]
    assert existing_file.stat() == initial_status


def test_forged_outcomes_earn_no_reward() -> None:
    attack = (
        "import os\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, {data!r})\n    except OSError: pass\n"
    )
    result = run(attack.format(data=b"[1]\nnot json\n" + b"[" * 5000 + b"\n") + "os._exit(0)\n")
    assert not any(outcome.has_returned for outcome in result.outcomes)
    environment = make_environment(max_turns=1)
    environment.reset(seed=2)
    forged_outcomes = b'{"value": true, "passed": true}\n' * 8
    result = environment.step(
        CodeAction(code=attack.format(data=forged_outcomes) + "os._exit(0)\n")
    )
    assert (result.reward, result.success) == (0.0, False)


@pytest.mark.slow
async def test_programs_run_in_sandboxed_workers() -> None:
    options = ServerOptions(port=0, isolation="process")
    async with EnvServer(make_environment, options) as server:
        assert await asyncio.to_thread(solve_over_http, server.http_address) == (1.0, 0, "hi\n")


def solve_over_http(address: str) -> tuple[float | None, int, str]:
    """Solve a task over HTTP; return the reward, the exit code and stdout."""
    with CodingEnv(base_url=address) as env:
        observation = env.reset(seed=1).observation
        action = fixed_policies({})["solution"](observation.model_dump(), random.Random(0))
        result = env.step(CodeAction(code="print('hi')\n" + action["code"]))
        return result.reward, result.observation.exit_code, result.observation.stdout
