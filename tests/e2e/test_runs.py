"""Complete runs with a real server, Ray and gloo: interrupted, resumed and refused."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from ludus.proto.runs import read_samples
from tests.e2e.runs import start_run, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_interrupted_run_saves_a_checkpoint_ends_all_processes_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    settings = ("learner.num_ranks=2", "model.warm_start_games=16")
    with start_run(tmp_path, "training.num_steps=1000", *settings) as run:
        run.wait_until(lambda: run.last_step >= 3)
        start_s = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(300) == 130
        assert time.monotonic() - start_s < 60, "the run did not stop within a minute"
        last_step = run.last_step
    wait_until_gone(str(tmp_path))
    checkpoints = list((run.folder / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == [f"step-{last_step:08d}"]

    with start_run(
        tmp_path, *settings, f"training.num_steps={last_step + 3}", flags=("--resume",)
    ) as run:
        summary = run.finish()
    assert (summary.num_steps, summary.num_learner_ranks) == (last_step + 3, 2)
    steps = [row.step for row in run.rows if row.kind == "train"]
    assert steps == list(range(1, last_step + 4)), "a step is missing or repeated"
    samples = read_samples(run.folder)
    assert [sample.step for sample in samples] == [0] * 8 + [last_step + 3] * 8
    assert [sample.seed for sample in samples[:8]] == [sample.seed for sample in samples[8:]]
    num_games_trained = [row.num_games_trained for row in run.rows if row.kind == "train"]
    assert num_games_trained == sorted(set(num_games_trained))
    wait_until_gone(str(tmp_path))


@pytest.mark.usefixtures("shared_ray")
def test_vllm_samples_with_learner_weights_after_every_sync(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM has no wheel for this machine")
    with start_run(tmp_path, "generator.kind=vllm") as run:
        summary = run.finish()
    assert summary.generator == "vllm"
    assert summary.weight_syncs == 7
    assert 0 < summary.canary_max_error < 1e-4


@pytest.mark.long
@pytest.mark.usefixtures("shared_ray")
def test_run_restricted_to_legal_answers_samples_no_other_text(tmp_path: Path) -> None:
    length = ("training.num_steps=2", "model.warm_start_games=1", "eval.num_games=100")
    # Without stale samples, the learner must compute the log-probs of the sampler.
    settings = (*length, "training.max_staleness=0", "rollout.constrain=legal_answers")
    with start_run(tmp_path, *settings) as run:
        run.finish()
    trained_rows = [row.values for row in run.rows if row.kind == "train"]
    assert [values["num_episodes_invalid"] for values in trained_rows] == [0, 0]
    assert max(values["mismatch_kl"] for values in trained_rows) < 1e-5
    assert min(values["entropy"] for values in trained_rows) > 0
    evaluations = [row.values for row in run.rows if row.kind == "eval"]
    assert [values["invalid_rate"] for values in evaluations] == [0] * len(evaluations)
    assert len(evaluations) == 2, "the run was not evaluated before and after the training"


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["environment.package=blakjack_env"], "no environment package 'blakjack_env'"),
        pytest.param(
            ["environment.kind=remote", "environment.address=grpc://127.0.0.1:9"],
            "127.0.0.1:9",
            marks=pytest.mark.long,
        ),
    ],
)
def test_invalid_input_exits_with_one_error_and_leaves_no_run_folder(
    tmp_path: Path, settings: list[str], message: str
) -> None:
    with start_run(tmp_path, "environment.options={}", *settings) as run:
        assert run.process.wait(300) == 2
        output = run.output()
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in output
    assert not run.folder.exists()
