"""Programming tasks: what is drawn, paid and said, and what a program cannot do."""

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
from coding_env.problems import draw_task, solution_of
from coding_env.server.programs import Ended, Limits, run_program
from coding_env.text import CodingRenderer
from ludus.env.check import check_environment
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import LocalEnvironment, load_run_config
from ludus.proto.errors import ActionParseError, ConfigError, EpisodeStateError, ErrorCode
from ludus.trainer.models.tiny import make_tokenizer

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux confines programs"
)
ROOT = Path(__file__).parents[2]
LIMITS = Limits(cpu_s=1, memory_bytes=256 << 20, output_bytes=1000)
IDENTITY = "def solve(x):\n    return x\n"


def ran(code: str, calls: int = 2, cpu_s: int = LIMITS.cpu_s) -> Ended:
    limits = replace(LIMITS, cpu_s=cpu_s)
    return run_program(code, [[number] for number in range(calls)], limits)


def values(ended: Ended) -> list[object]:
    return [outcome.value for outcome in ended.outcomes]


def played(policy: str, seed: int, **options: int) -> list[tuple[float | None, bool | None]]:
    environment = make_environment(**options)
    act = fixed_policies({})[policy]
    result = environment.reset(seed=seed)
    steps = []
    while not result.terminated:
        chosen = act(result.observation.model_dump(), random.Random(0))
        result = environment.step(CodeAction.model_validate(chosen))
        steps.append((result.reward, result.success))
    return steps


def with_a_loop(observation: CodeObservation) -> str:
    """Right for the first call only; then it never ends."""
    first = observation.prompt.split("\n")[2].partition(" == ")[2]
    return (
        f"calls = []\ndef solve(x):\n    calls.append(x)\n    while len(calls) > 1: pass\n"
        f"    return {first}\n"
    )


@pytest.mark.slow
def test_every_rule_of_the_environment_contract_holds() -> None:
    check_environment(make_environment, seeds=range(2), num_steps=3).raise_if_failed()


def test_the_classes_are_found_as_the_documents_of_openenv_import_them() -> None:
    package = importlib.import_module("envs.coding_env")
    assert package.CodeAction(code="print(1)").code == "print(1)"
    assert package.CodingEnv.default_url == "http://localhost:8008"


def test_tasks_follow_from_the_seed_and_their_kinds_and_numbers_differ() -> None:
    tasks = [draw_task(random.Random(seed), 4) for seed in range(300)]
    assert tasks == [draw_task(random.Random(seed), 4) for seed in range(300)]
    assert len({task.problem for task in tasks}) == 8
    assert len({task.text for task in tasks}) > 100
    assert all("$" not in task.text for task in tasks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_solution_passes_all_tests_at_once_and_a_wrong_program_none(seed: int) -> None:
    assert played("solution", seed) == [(1.0, True)]
    assert played("wrong", seed, max_turns=2) == [(0.0, None), (0.0, False)]


@pytest.mark.slow
def test_tests_that_passed_before_a_loop_are_paid() -> None:
    environment = make_environment(max_turns=1, num_tests=4, time_limit_s=1)
    code = with_a_loop(environment.reset(seed=3).observation)
    result = environment.step(CodeAction(code=code))
    assert result.observation.tests_passed == [True, False, False, False]
    assert (result.reward, result.success) == (0.25, False)
    assert result.observation.timed_out and "took too long" in result.observation.feedback
    assert "was not reached" in result.observation.feedback
    assert (environment.state.num_passed, environment.state.last_exit_code) == (1, -9)


def test_feedback_tells_what_the_shown_calls_returned_and_nothing_of_the_others() -> None:
    environment = make_environment(num_shown=1, num_tests=3)
    environment.reset(seed=1)
    result = environment.step(CodeAction(code="print('so')\ndef solve(x):\n    return [None]\n"))
    said = result.observation.feedback
    assert said.startswith("0 of 3 tests passed.") and said.count("expected") == 1
    assert "got [None]." in said and said.endswith("stdout:\nso")
    assert (result.reward, result.terminated) == (0.0, False)


def test_a_program_before_the_reset_and_after_the_end_is_refused() -> None:
    environment = make_environment(max_turns=1, num_tests=1)
    with pytest.raises(EpisodeStateError) as refused:
        environment.step(CodeAction(code=""))
    assert refused.value.code == ErrorCode.NOT_RESET
    environment.reset(seed=1)
    assert environment.step(CodeAction(code="")).terminated
    with pytest.raises(EpisodeStateError) as refused:
        environment.step(CodeAction(code=""))
    assert refused.value.code == ErrorCode.EPISODE_OVER


def test_kinds_say_which_tasks_are_drawn_and_how_programs_look() -> None:
    environment = make_environment(kinds=["multiply", "add"])
    shown = [environment.reset(seed=seed).observation for seed in range(50)]
    assert {one.problem for one in shown} == {"multiply", "add"}
    assert all(f"and {one.parameters['k']}." in one.prompt for one in shown)
    answers = environment.text_renderer.legal_answers(shown[0])
    assert len(set(answers)) == 18
    assert {solution_of(one.problem, one.parameters) for one in shown} <= set(answers)
    assert environment.options["kinds"] == ["multiply", "add"]


def test_programs_of_kinds_that_have_many_are_not_listed() -> None:
    environment = make_environment()
    shown = environment.reset(seed=1).observation
    assert environment.text_renderer.legal_answers(shown) == []


@pytest.mark.parametrize("kind", ["add", "subtract", "multiply"])
def test_a_program_of_one_line_is_right_for_its_own_number_only(kind: str) -> None:
    environment = make_environment(kinds=[kind], max_turns=1, num_shown=0)
    asked = environment.reset(seed=1).observation.parameters["k"]
    for given in (asked, asked % 9 + 1):
        environment.reset(seed=1)
        code = solution_of(kind, {"k": given})
        assert environment.step(CodeAction(code=code)).success is (given == asked)


def test_the_example_plays_and_its_answers_are_programs_that_it_may_say_whole() -> None:
    run = load_run_config(ROOT / "examples" / "coding" / "tiny.toml")
    (configured,) = run.environments.values()
    assert isinstance(configured, LocalEnvironment)
    environment = make_environment(**configured.options)
    observation = environment.reset(seed=5).observation
    (asked,) = environment.text_renderer.render(observation, first=True)
    answers = environment.text_renderer.legal_answers(observation)
    tokenizer = make_tokenizer([asked["content"], *answers], 512)
    assert len(answers) == round(1 / learn.ONE_PROGRAM)
    rewards = []
    for answer in answers:
        assert len(tokenizer.encode(answer)) < run.rollout.max_completion_tokens
        environment.reset(seed=5)
        result = environment.step(environment.text_renderer.parse(answer, observation))
        rewards.append(result.reward)
        assert result.terminated
    assert sorted(rewards)[-2:] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        (["add", "divide"], "where 'divide' is none of them"),
        ([], "got \\[\\]"),
        ("add", "multiply; got 'add'"),
        ([["add"]], "where \\['add'\\] is none of them"),
    ],
)
def test_kinds_that_are_not_known_are_refused_with_those_that_are(kinds: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"expected kinds as a list of .*digit_sum.*{why}"):
        make_environment(kinds=kinds)


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"num_tests": True}, {"memory_mb": 1}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"expected {next(iter(options))} as a whole number"):
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
def test_the_last_fence_is_the_program_or_else_the_whole_text(text: str, code: str) -> None:
    observation = CodeObservation(prompt="", problem="", parameters={})
    assert CodingRenderer().parse(text, observation).code == code


@pytest.mark.parametrize("text", ["", " \n", "x = 1\0", "```python\n```"])
def test_a_text_without_a_program_is_no_action(text: str) -> None:
    observation = CodeObservation(prompt="", problem="", parameters={})
    with pytest.raises(ActionParseError, match="expected Python code"):
        CodingRenderer().parse(text, observation)


def test_what_is_printed_raised_and_returned_is_told_apart() -> None:
    ended = ran("print('out')\ndef solve(x):\n    return 1 // x\n")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "out\n", "")
    assert ended.outcomes[0].error == "ZeroDivisionError: integer division or modulo by zero"
    assert ended.outcomes[1].value == 1
    broken = ran("def solve(x:\n")
    assert broken.exit_code == 1 and "SyntaxError" in broken.stderr and not broken.outcomes
    assert ran("x = 1").outcomes[0].error == "NameError: there is no function solve"


def test_a_program_leaves_nothing_for_the_next_one() -> None:
    ran("import builtins, math\nbuiltins.left = math.left = 1\nimport sys\nsys.path.clear()\n")
    ended = ran("import fractions, math\ndef solve(x):\n    return math.left if x else left\n")
    assert not any(outcome.has_returned for outcome in ended.outcomes)
    assert ended.outcomes[0].error.startswith("NameError")


def test_a_runner_that_was_killed_is_started_again() -> None:
    parent = "open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1]"
    code = f"import os\ndef solve(x):\n    pid = os.getppid()\n    return int({parent})\n"
    first, second = ran(code), ran(code)
    assert values(first) == values(second)
    runner = first.outcomes[0].value
    assert isinstance(runner, int) and runner != os.getpid()
    os.kill(runner, signal.SIGKILL)
    os.waitpid(runner, 0)
    third = ran(code)
    assert runner != third.outcomes[0].value and third.outcomes[0].has_returned


def test_programs_of_several_threads_are_told_apart() -> None:
    with ThreadPoolExecutor(8) as threads:
        codes = [f"def solve(x):\n    return {number}\n" for number in range(24)]
        ended = list(threads.map(lambda code: ran(code, cpu_s=60), codes))  # beside each other
    assert [values(one) for one in ended] == [[n, n] for n in range(24)]


def test_the_same_program_says_the_same_twice() -> None:
    code = "def solve(x):\n    return list({'a', 'b', 'c', 'd', str(x)})\nprint(hash('a'))\n"
    assert ran(code) == ran(code)


@pytest.mark.parametrize("where", ["import sys; sys.exit(7)\n", "import os; os._exit(7)\n"])
def test_an_exit_ends_the_program_and_passes_nothing(where: str) -> None:
    ended = ran(where + IDENTITY)
    assert (ended.exit_code, ended.outcomes, ended.timed_out) == (7, (), False)


def test_an_exit_in_a_call_leaves_those_before_it() -> None:
    ended = ran("import sys\ndef solve(x):\n    return x if x < 1 else sys.exit(0)\n", calls=4)
    assert (ended.exit_code, values(ended)) == (0, [0])


@pytest.mark.slow
def test_an_endless_loop_is_ended_by_its_time_of_computing() -> None:
    ended = ran("while True:\n    try:\n        pass\n    except BaseException:\n        pass\n")
    assert ended.timed_out and ended.exit_code == -9


@pytest.mark.slow
def test_a_program_that_only_waits_is_ended_too() -> None:
    assert ran("import time\ntime.sleep(600)\n").timed_out


def test_of_a_huge_output_the_beginning_is_kept_and_the_program_goes_on() -> None:
    ended = ran(
        "import sys\nfor f in (sys.stdout, sys.stderr): f.write('é' * 3_000_000)\n" + IDENTITY
    )
    assert ended.stdout == ended.stderr == "é" * 500
    assert values(ended) == [0, 1]


def test_memory_beyond_the_limit_is_an_error_of_the_program() -> None:
    ended = ran("def solve(x):\n    return len(bytearray(1 << 30)) if x else 0\n")
    assert ended.outcomes[0].value == 0 and ended.outcomes[1].error == "MemoryError"


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param("while True: os.fork()", id="fork bomb"),
        pytest.param("subprocess.run(['/bin/true'])", id="program"),
        pytest.param("threading.Thread(target=print).start()", id="thread"),
        pytest.param("os.kill(os.getppid(), 9)", id="signal"),
        pytest.param("socket.socket()", id="network"),
        pytest.param("resource.setrlimit(resource.RLIMIT_CPU, (99, 99))", id="limits"),
        pytest.param("open(FOLDER + '/made', 'w').write('x')", id="write"),
        pytest.param("os.remove(FOLDER + '/kept')", id="remove"),
        pytest.param("open(FOLDER + '/kept').read()", id="read"),
        pytest.param("open(f'/proc/{os.getppid()}/mem', 'rb').read(1)", id="memory of its parent"),
        pytest.param("os.chmod(FOLDER + '/kept', 0o777)", id="mode"),
        pytest.param("os.utime(FOLDER + '/kept', (1, 1))", id="times"),
        pytest.param("os.chown(FOLDER + '/kept', 1, 1)", id="owner"),
        pytest.param("os.setxattr(FOLDER + '/kept', 'user.a', b'b')", id="attributes"),
        pytest.param("import coding_env", id="our code"),
        pytest.param("import pydantic", id="what is installed"),
    ],
)
def test_the_kernel_refuses_what_computing_does_not_need(deed: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x")
    before = kept.stat()
    imports = "import os, resource, socket, subprocess, threading\n"
    names = f"FOLDER = {str(tmp_path)!r}\n"
    tries = f"def solve(x):\n    if x: return 'alive'\n    {deed}\n    return 'done'\n"
    ended = ran(imports + names + tries)
    assert not ended.outcomes[0].has_returned, ended
    assert ended.outcomes[0].error.split(":")[0] in {
        *("PermissionError", "RuntimeError", "ValueError", "OSError", "ModuleNotFoundError"),
    }
    assert ended.outcomes[1].value == "alive"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.stat() == before


def test_results_that_a_program_writes_itself_are_worth_what_they_say() -> None:
    forged = (
        "import os\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, {data!r})\n    except OSError: pass\n"
    )
    nonsense = ran(forged.format(data=b"[1]\nnot json\n" + b"[" * 5000 + b"\n") + "os._exit(0)\n")
    assert not any(outcome.has_returned for outcome in nonsense.outcomes)
    environment = make_environment(max_turns=1)
    environment.reset(seed=2)
    guess = b'{"value": true, "passed": true}\n' * 8
    result = environment.step(CodeAction(code=forged.format(data=guess) + "os._exit(0)\n"))
    assert (result.reward, result.success) == (0.0, False)


@pytest.mark.slow
async def test_programs_run_in_confined_workers_and_over_wires() -> None:
    options = ServerOptions(port=0, isolation="process")
    async with EnvServer(make_environment, options) as up:
        assert await asyncio.to_thread(solved_over, up.http_address) == (1.0, 0, "hi\n")


def solved_over(address: str) -> tuple[float | None, int, str]:
    with CodingEnv(base_url=address) as env:
        observation = env.reset(seed=1).observation
        chosen = fixed_policies({})["solution"](observation.model_dump(), random.Random(0))
        result = env.step(CodeAction(code="print('hi')\n" + chosen["code"]))
        return result.reward, result.observation.exit_code, result.observation.stdout
