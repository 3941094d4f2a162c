"""Run TRL's own OpenEnv scripts with Ludus on OpenEnv's servers, and with TRL on our servers.

    script --import changed--> Ludus --> servers of OpenEnv's packages
    script --unchanged-------> TRL   --> our servers of the same games

Every change of a script's text is in the results. Neither the scripts nor OpenEnv's packages are
part of this repository; clone both:

    git clone https://github.com/huggingface/trl
    git clone https://github.com/huggingface/OpenEnv
    git -C OpenEnv checkout a75310c5^ -- envs/echo_env   # the last version with EchoAction
    python bench/tool_model.py MODEL TEMPLATE FOLDER      # a model that calls the tools
    python bench/trl_scripts.py --scripts trl/examples/scripts/openenv --packages OpenEnv/envs \\
        --model FOLDER

NLTK's word list cannot be downloaded everywhere, so the Wordle server gets a short list.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import machine, write_runs
from trl_environment import ROOT, find_trl_python

from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import read_metrics

sys.path.insert(0, str(ROOT / "dev"))

from quiet_ports import quiet_ports
from upstream_environment import build_virtual_environment

RESULTS = ROOT / "bench" / "results" / "trl_scripts.json"
NUM_STEPS = 5
TIMEOUT_S = 3600
IMPORT = (r"^from trl import", "from ludus.trainer.compat.trl import")
SHORT = (r"GRPOConfig\(\n", "GRPOConfig(\n            max_completion_length=64,\n")
STEPS = (r"GRPOConfig\(\n", f"GRPOConfig(\n            max_steps={NUM_STEPS},\n")
CPU = (r"GRPOConfig\(\n", "GRPOConfig(\n            bf16=False, use_cpu=True,\n")
NO_TRACKIO = (r'report_to="trackio"', 'report_to="none"')
NO_VLLM = (r"use_vllm=True", "use_vllm=False")
WORDS = ["apple", "bread", "chair", "glass", "heart", "night", "ocean", "river", "stone", "water"]
SERVER_PACKAGES = ["openenv==0.10.0", "textarena==0.7.4", "nltk", "open_spiel==2.0.2", "gradio"]

Edit = tuple[str, str]


@dataclass(frozen=True)
class Script:
    """A script of TRL, and what a short run of it needs."""

    package: str
    """OpenEnv's package of the environment."""
    arguments: str
    """Arguments, in which {model} and {url} are replaced."""
    edits: tuple[Edit, ...] = ()
    """Changes of the text that make the run small, for settings without an argument."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of OpenEnv's server."""
    ludus: tuple[str, str] | None = None
    """Our package and its options; None if we serve no such environment."""


SCRIPTS = {
    "echo": Script(
        "echo_env",
        "--model {model} --env-host {url}",
        (SHORT, STEPS, (r"logging_steps=2", "logging_steps=1")),
        ludus=("echo_env", "{}"),
    ),
    "catch": Script(
        "openspiel_env",
        "--model {model} --env-mode space --env-host {url} --dataset-size 5",
        (
            (r"max_completion_length=4096", "max_completion_length=160"),
            (r"gradient_accumulation_steps=16", "gradient_accumulation_steps=4"),
            NO_VLLM,
        ),
        ludus=("openspiel_env", '{"game": "catch"}'),
    ),
    "wordle": Script(
        "textarena_env",
        "--model {model} --env-url {url} --dataset-size 10 --gradient-accumulation-steps 1",
        ((r"max_completion_length=1024", "max_completion_length=160"), NO_VLLM),
        {"TEXTARENA_ENV_ID": "Wordle-v0", "TEXTARENA_DOWNLOAD_NLTK": "0"},
    ),
    "sudoku": Script(
        "textarena_env",
        "--model-id {model} --env-host {url} --dataset-size 5 --num-generations 4 --max-turns 1 "
        "--per-device-batch-size 4 --gradient-accumulation-steps 1 --max-completion-length 320",
        (NO_VLLM,),
        {"TEXTARENA_ENV_ID": "Sudoku-v0", "TEXTARENA_DOWNLOAD_NLTK": "0"},
    ),
}


@contextmanager
def start_server(command: list[str], url: str, environment: dict[str, str]) -> Iterator[None]:
    """Start a server, wait until it responds, and stop it on exit from the context."""
    server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 300
        while not _is_responding(f"{url}/health"):
            assert server.poll() is None, f"the server exited: {command}"
            assert time.monotonic() < deadline_s, "the server did not start in time"
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait()


def _is_responding(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def write_word_list(folder: Path) -> None:
    """Write NLTK's corpus of words and its tagger, for the words of this file."""
    corpus, tagger = folder / "corpora" / "words", folder / "taggers"
    name = "averaged_perceptron_tagger_eng"
    contents = {"weights": {}, "tagdict": dict.fromkeys(WORDS, "NN"), "classes": ["NN"]}
    corpus.mkdir(parents=True)
    (tagger / name).mkdir(parents=True)
    for file in ("en", "en-basic"):
        (corpus / file).write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    for key, content in contents.items():
        (tagger / name / f"{name}.{key}.json").write_text(json.dumps(content), encoding="utf-8")


def write_client_packages(folder: Path, upstream: Path) -> None:
    """Make OpenEnv's client and `datasets` importable behind the packages of this interpreter."""
    folder.mkdir()
    code = f"import sys\nsys.path.append({str(upstream)!r})\n"
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    # OpenEnv needs another version of mcp than the packages of this interpreter.
    for path in (upstream / "mcp", *upstream.glob("mcp-*.dist-info")):
        (folder / path.name).symlink_to(path)


class Bench:
    """The folders and interpreters of a measurement."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.scripts = arguments.scripts.absolute()
        self.packages = arguments.packages.absolute()
        self.model = str(arguments.model.absolute())
        self.folder = folder
        self.trl_python = find_trl_python()
        name = "upstream-openenv-0.10.0+textarena-0.7.4+open_spiel-2.0.2"
        self.server_python = build_virtual_environment(name, SERVER_PACKAGES)
        write_word_list(folder / "nltk")
        [upstream] = self.trl_python.parents[1].glob("lib/python*/site-packages")
        write_client_packages(folder / "site", upstream)

    def serve(self, script: Script, url: str, *, with_ludus: bool) -> Any:
        """Return the context of a running server, OpenEnv's or ours."""
        port = url.rpartition(":")[2]
        environment = {**os.environ, **script.variables, "NLTK_DATA": str(self.folder / "nltk")}
        if with_ludus:
            assert script.ludus is not None
            package, options = script.ludus
            command = [sys.executable, "-m", "ludus.env", package, "--options", options]
            return start_server([*command, "--port", port], url, environment)
        environment["PYTHONPATH"] = str(self.packages)
        program = str(ROOT / "bench" / "upstream" / "openenv_server.py")
        command = [str(self.server_python), program, script.package, port]
        return start_server(command, url, environment)

    def run(self, name: str, *, with_trl: bool) -> dict[str, Any]:
        """Run a script with TRL on our server, or with Ludus on OpenEnv's; return its results."""
        script, target = SCRIPTS[name], self.folder / f"{name}-{'trl' if with_trl else 'ludus'}"
        edits = [*script.edits, *((CPU, NO_TRACKIO) if with_trl else (IMPORT,))]
        target.mkdir()
        applied_edits = _write_script(self.scripts / f"{name}.py", target / f"{name}.py", edits)
        for file in self.scripts.glob("*.txt"):
            shutil.copy(file, target)
        [port] = quiet_ports(1)
        url = f"http://127.0.0.1:{port}"
        arguments = [part.format(model=self.model, url=url) for part in script.arguments.split()]
        site = [] if with_trl else [str(self.folder / "site")]
        paths = [*site, str(self.packages)]
        if not with_trl:
            paths += [path for path in (os.environ.get("PYTHONPATH") or "").split(":") if path]
        python = str(self.trl_python if with_trl else sys.executable)
        with self.serve(script, url, with_ludus=with_trl):
            process = subprocess.run(
                [python, f"{name}.py", *arguments],
                cwd=target,
                env={**os.environ, "PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        (target / "stderr.txt").write_text(process.stderr, encoding="utf-8")
        (target / "stdout.txt").write_text(process.stdout, encoding="utf-8")
        values = _read_trl_log(process.stdout) if with_trl else _read_ludus_run(target)
        losses = values["loss"]
        is_finite = bool(losses) and all(map(math.isfinite, losses))
        return {
            "script": name,
            "trainer": "TRL 1.16" if with_trl else "Ludus",
            "server": "Ludus" if with_trl else "OpenEnv 0.10",
            "changed_imports": 0 if with_trl else 1,
            "changed_settings": applied_edits,
            "arguments": arguments,
            "num_steps": len(losses),
            "losses": losses,
            "rewards": values["reward"],
            "tool_calls": values["tools"],
            "passed": process.returncode == 0 and is_finite,
            "error": process.stderr[-1500:] if process.returncode else "",
            "machine": machine(),
        }


def _write_script(source: Path, target: Path, edits: list[Edit]) -> list[str]:
    """Copy a script with the edits; return the settings that were changed, without the import."""
    text, changes = source.read_text(encoding="utf-8"), []
    for pattern, replacement in edits:
        changed_text = re.sub(pattern, replacement, text, count=1, flags=re.MULTILINE)
        if changed_text != text and (pattern, replacement) != IMPORT:
            changes.append(" ".join(replacement.replace("GRPOConfig(\n", "").split()).strip(","))
        text = changed_text
    target.write_text(text, encoding="utf-8")
    return changes


def _read_ludus_run(folder: Path) -> dict[str, list[float]]:
    """Return the losses, rewards and tool calls of the run in a folder."""
    runs = [path.parent for path in folder.glob("**/metrics.jsonl")]
    rows = [row.values for run in runs for row in read_metrics(run) if row.kind == "train"]
    names = {"loss": TrainMetric.LOSS, "reward": TrainMetric.REWARD_MEAN}
    names |= {"tools": TrainMetric.NUM_TOOL_CALLS}
    return {key: [row[name] for row in rows if name in row] for key, name in names.items()}


def _read_trl_log(text: str) -> dict[str, list[float]]:
    """Return the losses, rewards and calls per episode that TRL printed."""
    names = {"loss": "loss", "reward": "reward", "tools": "tools/call_frequency"}
    return {
        key: [float(value) for value in re.findall(rf"'{name}': '?([-+.\w]+)", text)]
        for key, name in names.items()
    }


def main() -> int:
    """Return the exit code: 1 if a script failed or had a loss that is not finite."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", type=Path, required=True, help="examples/scripts/openenv")
    parser.add_argument("--packages", type=Path, required=True, help="OpenEnv's folder envs")
    parser.add_argument("--model", type=Path, required=True, help="folder of a model with tools")
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--trainers", nargs="+", choices=["ludus", "trl"], default=["ludus", "trl"])
    parser.add_argument("--folder", type=Path, help="working folder, kept. Default: temporary")
    arguments = parser.parse_args()
    rows = _read_rows()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(arguments, arguments.folder or Path(temporary))
        for name in arguments.only:
            for trainer in arguments.trainers:
                if trainer == "trl" and SCRIPTS[name].ludus is None:
                    continue
                row = bench.run(name, with_trl=trainer == "trl")
                print(json.dumps(row), flush=True)
                rows[f"{name} {trainer}"] = row
                ordered_rows = [rows[key] for key in sorted(rows)]
                write_runs(RESULTS, "python bench/trl_scripts.py", ordered_rows)
    return int(not all(row["passed"] for row in rows.values()))


def _read_rows() -> dict[str, dict[str, Any]]:
    if not RESULTS.exists():
        return {}
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    return {f"{run['script']} {run['trainer'].split()[0].lower()}": run for run in runs}


if __name__ == "__main__":
    sys.exit(main())
