"""Programs run from whatever folder, with whatever settings of a process their server starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from coding_env import CodeAction, CodingEnv
from coding_env.problems import write_solution
from tests.attack.attacked import LUDUS_PROGRAM, make_cases, serve_env_with_launcher
from tests.coding.installations import install

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs need Linux"),
]

ISOLATIONS = ("process", "pool", "inline")
_ENTER = "os.makedirs({name!r}); os.chdir({name!r})"
_LAUNCHER = "import os, resource, signal, sys\n{code}\nos.execvp(sys.argv[1], sys.argv[1:])"
_CLEAR = (
    "path = os.environ.get('PYTHONPATH', ''); os.environ.clear()\nos.environ['PYTHONPATH'] = path"
)
_HOSTILE_MODULES = ("json", "socket", "resource", "ludus", "encodings", "answer")
FOLDERS = {
    "empty": _ENTER.format(name="empty"),
    "deleted": "os.mkdir('a'); os.chdir('a'); os.rmdir('../a')",
    "not readable": (
        "from ludus.env.sandbox.processes import give_up_privileges\n"
        "os.mkdir('closed'); os.chdir('closed'); os.chmod('.', 0); give_up_privileges()"
    ),
    "blanks": _ENTER.format(name=" a  'b' \"c\" $HOME %s {0} : "),
    "other letters": _ENTER.format(name="Ünï–çødé 漢字 😀 \u202e"),
    "no UTF-8": "os.mkdir(b'\\xff\\xfe'); os.chdir(b'\\xff\\xfe')",
    "lines": _ENTER.format(name="a\nb\r\tc"),
    "longer than paths may be": "for _ in range(30):\n    os.mkdir('x' * 200); os.chdir('x' * 200)",
    "root": "os.chdir('/')",
    "link": "os.mkdir('a'); os.symlink('a', 'b'); os.chdir('b'); os.environ['PWD'] = '/nowhere'",
    "processes": "os.chdir('/proc/self')",
}
"""Code that enters a folder."""
PROCESSES = {
    "umask of all rights": "os.umask(0o777)",
    "umask of no rights": "os.umask(0)",
    "no variables": _CLEAR,
    "no UTF-8 in a folder of other letters": (
        f"{_CLEAR}\nos.environ.update(LC_ALL='C', PYTHONUTF8='0', "
        "PYTHONCOERCECLOCALE='0')\n" + FOLDERS["other letters"]
    ),
    "relative search path": (
        "os.mkdir('a'); os.chdir('a')\n"
        "paths = [os.path.relpath(p) if p else '' for p in sys.path if os.path.isdir(p or '.')]\n"
        "os.environ['PYTHONPATH'] = ':'.join([*paths, '.', '', '~'])"
    ),
    "settings of Python": (
        "os.environ.update(PYTHONSAFEPATH='1', PYTHONNOUSERSITE='1', "
        "PYTHONMALLOC='debug', PYTHONNODEBUGRANGES='1', PYTHONWARNINGS='error', "
        "PYTHONSTARTUP='x', PYTHONIOENCODING='ascii')"
    ),
    "closed standard streams": "os.closerange(0, 3)",
    "ignored signals": (
        "for n in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP): signal.signal(n, signal.SIG_IGN)"
    ),
    "blocked signals": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {*range(1, 65)} - {signal.SIGTERM})"
    ),
    "few open files": "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))",
    "lower limits than those of a program": (
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))"
    ),
    "temporary folder of other letters": (
        "os.makedirs('t m p ü'); os.environ['TMPDIR'] = os.path.abspath('t m p ü')"
    ),
    "relative temporary folder": "os.makedirs('tmp'); os.environ['TMPDIR'] = 'tmp'",
    "missing home": "os.environ.update(HOME='/nowhere', TMPDIR='/nowhere', PATH='')",
}
"""Code that changes a setting of the process."""


def make_launcher(code: str) -> list[str]:
    return [sys.executable, "-c", _LAUNCHER.format(code=code)]


def check_programs_run(launcher: Sequence[str], folder: Path, *arguments: str) -> None:
    """Start a server, and run programs that succeed and fail."""
    with (
        serve_env_with_launcher(launcher, folder, "coding_env", *arguments) as attacked,
        CodingEnv(base_url=attacked.http) as env,
    ):
        observation = env.reset(seed=1).observation
        result = env.step(CodeAction(code="import fractions\nopen('/etc/shadow')\n"))
        assert "PermissionError" in result.observation.stderr
        code = write_solution(observation.problem, observation.parameters)
        result = env.step(CodeAction(code=code))
        assert (result.reward, result.observation.stderr) == (1.0, ""), attacked.read_log()


@pytest.mark.parametrize("isolation", make_cases({name: name for name in ISOLATIONS}))
@pytest.mark.parametrize("code", make_cases(FOLDERS))
def test_programs_run_from_any_folder(tmp_path: Path, code: str, isolation: str) -> None:
    check_programs_run(make_launcher(code), tmp_path / "a", "--isolation", isolation)


@pytest.mark.parametrize("code", make_cases(PROCESSES, 0))
def test_programs_run_in_any_process(tmp_path: Path, code: str) -> None:
    check_programs_run(make_launcher(code), tmp_path / "a", "--isolation", "process")


@pytest.mark.attack
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_programs_run_from_a_folder_of_hostile_modules(tmp_path: Path, isolation: str) -> None:
    """Serve with the command, which imports only a named environment from its folder."""
    write = f"for n in {_HOSTILE_MODULES}: open(n + '.py', 'w').write('import os; os._exit(99)')"
    replace = f"sys.argv[1:4] = [{LUDUS_PROGRAM!r}, 'env', 'serve']"
    launcher = make_launcher(f"{FOLDERS['empty']}\n{write}\n{replace}")
    check_programs_run(launcher, tmp_path / "a", "--isolation", isolation)


@pytest.mark.attack
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_programs_run_from_an_installed_wheel(tmp_path: Path, isolation: str) -> None:
    python = str(install("wheel", tmp_path / "ünder a path"))
    code = f"os.environ['PYTHONPATH'] = ''; sys.argv[1] = {python!r}\n{FOLDERS['blanks']}"
    check_programs_run(make_launcher(code), tmp_path / "a", "--isolation", isolation)


@pytest.mark.attack
@pytest.mark.parametrize("isolation", ISOLATIONS[:2])
def test_programs_run_with_relative_paths(tmp_path: Path, isolation: str) -> None:
    code = "os.makedirs('data/ü'); os.makedirs('out'); os.chdir('data')"
    paths = ["--allow-read", "ü", "--allow-read", ".", "--allow-write", "../out"]
    check_programs_run(make_launcher(code), tmp_path / "a", "--isolation", isolation, *paths)
