"""Single layers of the worker sandbox, and the variables, paths and folders of workers."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.processes import take_user_id
from ludus.env.sandbox.worker_resources import (
    filter_variables,
    find_option_paths,
    list_code_paths,
    measure_disk_bytes,
    remove_folder,
)

PROGRAM_PATH = str(Path(__file__).with_name("one_layer.py"))
linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="sandbox layers exist only on Linux"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Create a folder that every user can read, unlike pytest's tmp_path."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def try_layer(layer: str, folder: Path, *operations: str) -> dict[str, Any]:
    """Attempt the operations under a single layer; return the error or "done" for each."""
    secret_path = folder / "secret"
    secret_path.write_text("x")
    secret_path.chmod(0o600 if layer == "user-id" else 0o644)
    arguments = [layer, str(folder), str(secret_path), str(os.getpid()), *operations]
    command = [sys.executable, PROGRAM_PATH, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    if "not offered" in report:
        pytest.skip(report["not offered"])
    return report


DENIAL_ERROR = "PermissionError"


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "operations"),
    [
        ("user-id", {"read", "write", "environ", "signal", "regain"}),
        ("landlock", {"read", "write", "environ"}),
        ("signal-scope", {"signal"}),
        ("seccomp", {"trace", "unshare"}),
        ("non-dumpable", {"be looked into"}),
    ],
)
def test_single_layer_denies_the_expected_operations(layer, operations, folder) -> None:
    report = try_layer(layer, folder, *operations, "write own")
    denied_operations = {name for name in operations if report[name] == DENIAL_ERROR}
    assert denied_operations == operations
    assert report["write own"] == "done"


@linux_only
@pytest.mark.slow
def test_number_of_processes_of_a_user_id_is_limited(folder) -> None:
    report = try_layer("process-limit", folder, "fork", "fork many")
    assert report == {"fork": "done", "fork many": "BlockingIOError"}


@linux_only
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user id")
def test_user_id_is_not_changed_if_required_paths_become_inaccessible(folder) -> None:
    private_folder = folder / "private"
    private_folder.mkdir(mode=0o700)
    (private_folder / "notes").touch()
    for readable_paths, writable_paths in (([private_folder / "notes"], []), ([], [folder])):
        with pytest.raises(
            LayerUnavailableError, match="which workers need, is closed to other users"
        ):
            take_user_id(1, folder, readable_paths, writable_paths)
    assert os.geteuid() == 0


@linux_only
@pytest.mark.slow
def test_process_in_namespaces_sees_only_itself(folder) -> None:
    report = try_layer("namespaces", folder)
    assert report["own pid"] == 2 and report["pids"] == [1, 2]
    assert report["signal"] == "ProcessLookupError"
    assert report["exit code"] == 7


_KILL_FORK_SERVER_PROGRAM = """
import os, signal
from ludus.env.sandbox import namespaces

fork_server = os.getpid()
unshare_namespaces = namespaces.unshare_namespaces

def kill_fork_server_and_unshare(without_network):
    os.kill(fork_server, signal.SIGKILL)
    unshare_namespaces(without_network)

namespaces.unshare_namespaces = kill_fork_server_and_unshare
try:
    namespaces.fork_into_namespaces(without_network=False)
finally:
    print("worker" if os.getpid() == 2 else "copy of the fork server", flush=True)
"""


@linux_only
@pytest.mark.slow
def test_fork_server_killed_during_fork_leaves_no_copy(folder) -> None:
    try_layer("namespaces", folder)  # skips the test if namespaces are not supported
    command = [sys.executable, "-c", _KILL_FORK_SERVER_PROGRAM]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert output == "worker\n"


def test_workers_get_only_listed_variables() -> None:
    variables = {
        **{"PATH": "/bin", "LC_ALL": "C", "PYTHONHASHSEED": "0", "MY_SETTING": "1"},
        **{"LUDUS_ENV_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "k", "HTTPS_PROXY": "user:pass"},
    }
    assert set(filter_variables(variables, ())) == {"PATH", "LC_ALL", "PYTHONHASHSEED"}
    assert filter_variables(variables, ["MY_SETTING"])["MY_SETTING"] == "1"


@pytest.mark.slow
def test_code_paths_are_readable_except_parents_of_worker_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers_folder = tmp_path / "work" / "workers"
    workers_folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "work"), str(tmp_path / "code")])
    paths = list_code_paths(workers_folder)
    assert tmp_path / "code" in paths
    assert not any(workers_folder.is_relative_to(path) for path in paths)
    assert any(Path(json.__file__).is_relative_to(path) for path in paths)
    assert any(Path(__file__).is_relative_to(path) for path in paths)


@pytest.mark.parametrize("module_name", ["helper.py", "helper/__init__.py"])
def test_working_folder_is_readable_only_if_a_loaded_module_comes_from_it(
    module_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers_folder = Path("/nonexistent/workers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path)])
    assert not any(tmp_path.is_relative_to(path) for path in list_code_paths(workers_folder))
    module = ModuleType("helper_of_this_test")
    module.__file__ = str(tmp_path / module_name)
    if "/" in module_name:
        module.__path__ = [str(tmp_path / "helper")]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert tmp_path in list_code_paths(workers_folder)


def test_packages_of_editable_installs_are_readable_before_their_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder_module = ModuleType("finder_of_this_test")
    finder_module.MAPPING = {"later": str(tmp_path / "later")}
    finder = type("Finder", (), {"__module__": finder_module.__name__})
    monkeypatch.setitem(sys.modules, finder_module.__name__, finder_module)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert tmp_path / "later" in list_code_paths(Path("/nonexistent/workers"))


def test_files_named_in_options_are_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("data", "rows", "test"):
        (tmp_path / name).touch()
    (tmp_path / "chess").mkdir()
    monkeypatch.chdir(tmp_path)
    options = {
        **{"a": str(tmp_path / "data"), "b": str(tmp_path / "none"), "game": "chess", "n": 3},
        **{"files": ["rows", "\0", "\ud800", "x" * 10_000], "splits": {"test": ("test", 1)}},
    }
    assert find_option_paths(options) == [tmp_path / name for name in ("data", "rows", "test")]


def test_folder_is_measured_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "worker"
    deep_folder = folder / "a" / "b"
    deep_folder.mkdir(parents=True)
    (deep_folder / "large").write_bytes(b"x" * 100_000)
    assert 100_000 < measure_disk_bytes(folder) < 200_000
    for index in range(100):
        (folder / str(index)).touch()
    assert measure_disk_bytes(folder) > 500_000
    (folder / "outside").symlink_to(tmp_path)
    deep_folder.chmod(0)
    remove_folder(folder)
    assert not folder.exists() and tmp_path.exists()
    assert measure_disk_bytes(folder) == 0
