"""A learner rank that runs out of memory: all ranks train the step again, in real Ray processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from ludus.proto.config import LanguageModelRun, LearnerConfig, PpoConfig, RayWeightStore
from ludus.proto.errors import ConfigError, LearnerLostError, LearnerMemoryError
from ludus.trainer.actors.cluster import place_in_ray
from ludus.trainer.actors.learner import LearnerGroup
from ludus.trainer.actors.placement import Roles, place_on_one_machine
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.abandonment import AbandonedStep
from ludus.trainer.learner.out_of_memory import is_out_of_memory, make_memory_error
from ludus.trainer.learner.step_metrics import StepMetrics
from tests.learner.tiny_policy import make_batch, make_policy_folder

COEFFICIENTS = Coefficients(learning_rate=1e-3, entropy=0.1, kl=0.1)
MAX_TOKENS = 128
NUM_STEPS = 5


def make_run(num_minibatches: int = 1) -> LanguageModelRun:
    run = LanguageModelRun()
    learner = LearnerConfig(
        num_ranks=2,
        num_threads=1,
        max_tokens_per_micro_batch=MAX_TOKENS,
        num_minibatches=num_minibatches,
    )
    rollout = run.rollout.model_copy(update={"temperature": 1.0, "max_tokens": 64})
    algorithm = PpoConfig(kl_coef=0.1, geometric_mask=None)
    return run.model_copy(
        update={"learner": learner, "rollout": rollout, "algorithm": algorithm, "seed": 0}
    )


def fail_once(phase: str) -> Callable[[object], None]:
    """Return a function that makes a rank run out of memory once, in a phase of its next step."""

    def add_hook(actor: object) -> None:
        import torch

        learner = actor._learner  # type: ignore[attr-defined]
        layer = learner._policy.language_model.model.layers[1]

        def fail(*_: object) -> None:
            handle.remove()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        if phase == "forward":
            handle = layer.register_forward_pre_hook(fail)
        elif phase == "backward":
            handle = layer.register_full_backward_hook(fail)
        else:
            handle = learner._optimizer.register_step_pre_hook(fail)

    return add_hook


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def learners(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LearnerGroup]:
    """Yield a learner with two ranks, in a Ray on this machine."""
    model_path = make_policy_folder(tmp_path_factory.mktemp("model"))
    run = make_run()
    async with place_in_ray(run, Roles.RANKS) as placement:
        learners = LearnerGroup(run, placement)
        await learners.start(model_path, RayWeightStore())
        yield learners
        learners.close()


async def train(learners: LearnerGroup, step: int) -> StepMetrics:
    metrics = await learners.train_step(make_batch(seed=step, num_prefix_tokens=5), COEFFICIENTS)
    assert isinstance(metrics, StepMetrics)
    return metrics


async def inject_failure(learners: LearnerGroup, rank: int, phase: str) -> None:
    await learners.ranks[rank].__ray_call__.remote(fail_once(phase))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_scope="module")
async def test_step_is_trained_again_in_smaller_micro_batches(
    learners: LearnerGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected_losses = [(await train(learners, step)).loss for step in range(NUM_STEPS)]
    assert learners.reduced_max_tokens is None
    await learners.restart(None)
    losses = []
    for step in range(NUM_STEPS):
        if step == 2:
            await inject_failure(learners, 1, "forward")
        if step == 3:
            await inject_failure(learners, 0, "backward")
        losses.append((await train(learners, step)).loss)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert learners.reduced_max_tokens == MAX_TOKENS // 4
    output = capsys.readouterr()
    assert (output.out + output.err).count("ran out of memory: CUDA out of memory") == 2

    # An update that only some ranks made cannot be repeated. The checkpoint is still usable.
    await learners.save(tmp_path / "state", tmp_path / "model")
    await inject_failure(learners, 1, "optimizer")
    with pytest.raises(LearnerLostError, match="cannot be trained again after its first update"):
        await train(learners, NUM_STEPS)
    await learners.restart(tmp_path / "state")
    assert isinstance(await train(learners, NUM_STEPS), StepMetrics)

    # Half of the limit would be less than the longest sequence.
    await inject_failure(learners, 1, "forward")
    with pytest.raises(ConfigError, match=r"longest sequence.*activation_checkpointing = true"):
        await train(learners, NUM_STEPS + 1)


@pytest.mark.parametrize(("saved_limit", "expected"), [(None, None), (64, 64), (256, None)])
def test_resumed_learner_keeps_a_smaller_limit(
    saved_limit: int | None, expected: int | None
) -> None:
    run = make_run()
    group = LearnerGroup(run, place_on_one_machine(run), reduced_max_tokens=saved_limit)
    assert group.reduced_max_tokens == expected


def test_limit_is_halved_down_to_the_longest_sequence() -> None:
    batch, error = make_batch(num_samples=24), torch.OutOfMemoryError("CUDA out of memory")
    longest, num_tokens = (
        int(value) for value in (batch.sequences.lengths.max(), batch.sequences.lengths.sum())
    )
    limits: list[int] = []
    config = LearnerConfig(max_tokens_per_micro_batch=16384)
    while True:
        failure = make_memory_error(0, batch, config, error)
        if isinstance(failure, ConfigError):
            break
        limits.append(failure.max_tokens)
        config = config.model_copy(update={"max_tokens_per_micro_batch": failure.max_tokens})
    assert limits[0] == num_tokens // 2, "a limit above the batch has no effect"
    assert limits[-1] == longest
    assert all(later <= max(earlier // 2, longest) for earlier, later in pairwise(limits))
    assert "set learner.activation_checkpointing = true" in str(failure)
    checkpointed = config.model_copy(update={"activation_checkpointing": True})
    last_failure = make_memory_error(0, batch, checkpointed, error)
    assert "activation_checkpointing" not in str(last_failure)
    assert "lower rollout.max_tokens" in str(last_failure)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("no memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("gloo: connection closed by peer"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error: RuntimeError, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


async def test_stop_during_the_replacement_abandons_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run()
    group = LearnerGroup(run, place_on_one_machine(run))

    async def run_out_of_memory(method: str, *_: object) -> None:
        assert method == "train_step", "a rank that starts has no step to abandon"
        raise LearnerMemoryError("learner rank 0 ran out of memory", 64)

    async def request_stop(_: LearnerMemoryError) -> None:
        group.ranks = [object()]  # a rank that starts
        await group.abandon_step(discards_state=False)

    monkeypatch.setattr(group, "_call_all", run_out_of_memory)
    monkeypatch.setattr(group, "_replace_ranks", request_stop)
    outcome = await group.train_step(make_batch(), COEFFICIENTS)
    assert outcome == AbandonedStep(is_restored=True)
