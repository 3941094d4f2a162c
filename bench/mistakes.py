"""Time typical mistakes from the command to its message.

Each mistake is a command in a new folder with a few files. A row has the seconds until the command
ended, the seconds divided by a start of Python in the same call, the exit code and the message. The
median of three starts of Python is the unit.

    python bench/mistakes.py
    python bench/mistakes.py --only "unknown key" --model .cache/models/smollm2
    python bench/mistakes.py --baseline ../older-checkout

With a baseline, another checkout runs the same commands right after this one. Results go to
bench/results/mistakes.json. The exit code is 1 if a mistake was not refused, or took longer than
its limit: 3 s for what is wrong in a file, 5 s for a wrong name, 10 s for a server that does not
answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from machine import setting

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "mistakes.json"
FILE_S, NAME_S, NETWORK_S = 3.0, 5.0, 10.0
TIMEOUT_S = 120.0
PACKAGES = ("proto", "envs/sdk", "envs", "services", "trainer")
_LUDUS = "import sys; sys.argv[0] = 'ludus'; from ludus.services.cli.app import main; main()"
_FRAME = re.compile(r"[╭╰ │─╮╯]*|╭─ Error ─+╮")
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

RUN = """name = "mistake"
[environment]
package = "prompts_env"
options = {path = "rows.csv", prompt = "question", answer = "answer", test_size = 0.5}
rewards = [{function = "my_rewards:exact"}]
[training]
num_steps = 2
"""
REWARDS = """def exact(completions, answer, **_):
    texts = [messages[-1]["content"] for messages in completions]
    return [float(text == right) for text, right in zip(texts, answer)]


def needs_hint(completions, hint):
    return [1.0 for _ in completions]
"""
GAME = """name = "mistake"
[environment]
package = "openspiel_env"
options = {game = "blackjack"}
policies = "openspiel_env.policies:fixed_policies"
[training]
num_steps = 2
"""
FILES = {
    "run.toml": RUN,
    "game.toml": GAME,
    "unquoted.toml": RUN.replace('"mistake"', "mistake"),
    "my_rewards.py": REWARDS,
    "rows.csv": "question,answer\n2 + 2 = ?,4\n3 + 3 = ?,6\n4 + 4 = ?,8\n5 + 5 = ?,10\n",
    "broken_rewards.py": "def exact(completions, **_)\n    return []\n",
    "no_model/readme.txt": "not a model\n",
    "model.gguf": "GGUF",
    "empty.csv": "",
    "broken.jsonl": '{"question": "1 + 1", "answer": "2"}\n{"question": "2 + 2"\n',
    "broken.jinja": "{% for message in messages %}{{ message.content }}",
    "broken_env.py": "class Broken\n    pass\n",
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command with a mistake."""

    name: str
    command: tuple[str, ...]
    max_s: float
    needs_model: bool = False
    """True if the command names the folder of a real model as MODEL."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a command."""

    duration_s: float
    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class Row:
    """Results of a mistake."""

    name: str
    command: str
    max_s: float
    outcome: Outcome
    ratio: float
    """Duration divided by that of a start of Python."""
    baseline: Outcome | None = None
    passed: bool = field(default=False)


def check(name: str, *overrides: str, max_s: float, file: str = "run.toml") -> Mistake:
    """Return the dry run of a file with overrides."""
    options = [text for override in overrides for text in ("--set", override)]
    return Mistake(name, ("train", file, "--dry-run", *options), max_s)


def list_file_mistakes() -> list[Mistake]:
    """Return mistakes in the command line and in the file."""
    return [
        check("unknown key", "training.num_stepps=3", max_s=FILE_S),
        check("unknown section", "trainig.num_steps=3", max_s=FILE_S),
        check("wrong type", "training.num_steps=ten", max_s=FILE_S),
        check("value out of range", "rollout.group_size=0", max_s=FILE_S),
        check("unknown algorithm", "algorithm.kind=grppo", max_s=FILE_S),
        check("unknown sink option", "metrics.wandb.mode=away", max_s=FILE_S),
        Mistake("missing file", ("train", "rum.toml", "--dry-run"), FILE_S),
        Mistake("text without quotes", ("train", "unquoted.toml", "--dry-run"), FILE_S),
        Mistake("misspelt command", ("trian", "run.toml"), FILE_S),
        Mistake("misspelt option", ("train", "run.toml", "--dryrun"), FILE_S),
        Mistake("report of a missing run", ("report", "mistaek"), FILE_S),
        Mistake("evaluation of a missing run", ("eval", "runs/mistaek"), FILE_S),
        Mistake("export of a missing run", ("export", "mistaek", "model"), FILE_S),
    ]


def list_name_mistakes() -> list[Mistake]:
    """Return wrong names of environments, data and functions."""
    options = "environment.options="
    return [
        Mistake("resume without a checkpoint", ("train", "run.toml", "--resume"), NAME_S),
        check("unknown package", "environment.package=promts_env", max_s=NAME_S),
        check("unknown game", f'{options}{{game="blackjak"}}', max_s=NAME_S, file="game.toml"),
        check("unknown option", f'{options}{{pth="rows.csv"}}', max_s=NAME_S),
        check(
            "unknown baseline", 'environment.baselines=["randon"]', max_s=NAME_S, file="game.toml"
        ),
        check("missing data", f'{options}{{path="rowz.csv", prompt="question"}}', max_s=NAME_S),
        check("missing column", f'{options}{{path="rows.csv", prompt="questoin"}}', max_s=NAME_S),
        check("empty data", f'{options}{{path="empty.csv", prompt="question"}}', max_s=NAME_S),
        check("broken row", f'{options}{{path="broken.jsonl", prompt="question"}}', max_s=NAME_S),
        check("misspelt reward function", 'environment.rewards=["my_rewards:exat"]', max_s=NAME_S),
        check("missing reward module", 'environment.rewards=["my_reward:exact"]', max_s=NAME_S),
        check(
            "reward without its column",
            'environment.rewards=["my_rewards:needs_hint"]',
            max_s=NAME_S,
        ),
        check(
            "syntax error in a reward", 'environment.rewards=["broken_rewards:exact"]', max_s=NAME_S
        ),
        Mistake("syntax error in an environment", ("env", "check", "broken_env:Broken"), NAME_S),
    ]


def list_model_mistakes() -> list[Mistake]:
    """Return mistakes about models and servers."""
    model = 'model={kind="pretrained", path="MODEL"}'
    return [
        check("missing model folder", 'model={kind="pretrained", path="./modle"}', max_s=NAME_S),
        check(
            "folder without a model", 'model={kind="pretrained", path="./no_model"}', max_s=NAME_S
        ),
        check("GGUF file", 'model={kind="pretrained", path="./model.gguf"}', max_s=NAME_S),
        check("unknown id", 'model={kind="pretrained", path="org/no-such-model"}', max_s=NETWORK_S),
        check(
            "server that does not answer",
            'environment={kind="remote", address="grpc://127.0.0.1:9"}',
            max_s=NETWORK_S,
        ),
        Mistake(
            "broken chat template",
            (
                "train",
                "run.toml",
                "--dry-run",
                "--set",
                f'{model[:-1]}, chat_template="broken.jinja"}}',
            ),
            NETWORK_S,
            needs_model=True,
        ),
        Mistake(
            "prompt longer than the limit",
            ("train", "run.toml", "--dry-run", "--set", model, "--set", "rollout.max_tokens=20"),
            NETWORK_S,
            needs_model=True,
        ),
    ]


def measure(mistakes: Sequence[Mistake], model: Path | None, baseline: Path | None) -> list[Row]:
    """Run the mistakes one after the other and print a line for each."""
    python_s = statistics.median(time_python() for _ in range(3))
    print(f"a start of Python: {python_s:.2f} s", flush=True)
    rows = []
    for mistake in mistakes:
        command = [text.replace("MODEL", str(model)) for text in mistake.command]
        outcome = run_command(ROOT, command)
        row = Row(
            name=mistake.name,
            command=" ".join(["ludus", *mistake.command]),
            max_s=mistake.max_s,
            outcome=outcome,
            ratio=outcome.duration_s / python_s,
            baseline=run_command(baseline, command) if baseline is not None else None,
            passed=outcome.exit_code not in (0, 1) and outcome.duration_s <= mistake.max_s,
        )
        rows.append(row)
        before_text = f" (before {row.baseline.duration_s:.1f} s)" if row.baseline else ""
        verdict = "ok" if row.passed else "MISSED"
        times = f"{outcome.duration_s:5.1f} s{before_text}"
        print(f"{verdict:<7}{times}  {row.name}: {outcome.message}", flush=True)
    return rows


def time_python() -> float:
    """Return the seconds that Python needs to start and end."""
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.monotonic() - start_s


def run_command(checkout: Path, command: Sequence[str]) -> Outcome:
    """Run a command of a checkout in a new folder with the files."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), FILES)
        paths = os.pathsep.join(str(checkout.resolve() / package) for package in PACKAGES)
        start_s = time.monotonic()
        completed = subprocess.run(
            [sys.executable, "-c", _LUDUS, *command],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": paths, "COLUMNS": "400", "HF_HUB_DISABLE_TELEMETRY": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        duration_s = time.monotonic() - start_s
        text = _TERMINAL_CODES.sub("", completed.stderr).replace(folder, "FOLDER")
        lines = [line.strip(" │") for line in text.splitlines() if not _FRAME.fullmatch(line)]
        return Outcome(duration_s, completed.returncode, " / ".join(lines[-4:])[:600])


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def main() -> None:
    """Measure and write the results."""
    description, _, _ = __doc__.partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mistakes to run; default: all")
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "models" / "smollm2")
    parser.add_argument("--baseline", type=Path, metavar="CHECKOUT", help="another checkout")
    args = parser.parse_args()
    model = args.model.resolve() if args.model.is_dir() else None
    mistakes = [
        mistake
        for mistake in (*list_file_mistakes(), *list_name_mistakes(), *list_model_mistakes())
        if (not args.only or mistake.name in args.only) and (model or not mistake.needs_model)
    ]
    rows = measure(mistakes, model, args.baseline)
    if not args.only:
        content = {**setting(), "rows": [asdict(row) for row in rows]}
        RESULTS.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    num_passed = sum(row.passed for row in rows)
    print(f"{num_passed} of {len(rows)} mistakes were refused in time")
    sys.exit(0 if num_passed == len(rows) else 1)


if __name__ == "__main__":
    main()
