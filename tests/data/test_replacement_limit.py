"""The replacement of zero-variance groups is bounded, whatever order the groups finish in."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.trainer.core.types import GroupSpec
from ludus.trainer.data.buffer import GroupAdmission, GroupBuffer
from ludus.trainer.data.counts import sum_counts
from ludus.trainer.data.mixture import Mixture, MixtureState
from ludus.trainer.run.checkpoint import RunState
from tests.data.rollouts import make_group

GROUPS_PER_STEP = 6


class Sampling:
    """Simulation of an on-policy run, in which groups finish in random order."""

    def __init__(self, has_variance: Callable[[int], bool], *, num_batches: int = 3) -> None:
        self.run = LanguageModelRun.model_validate(
            {
                "environments": {"coins": {}},
                "algorithm": {"max_group_batches": num_batches},
                "training": {"groups_per_step": GROUPS_PER_STEP, "max_staleness": 0},
            }
        )
        self.has_variance = has_variance
        self.state = RunState()
        self.start()

    def start(self) -> None:
        """Start sampling from `state`, as a new or a resumed run."""
        self.mixture = Mixture(self.run, self.state.mixture)
        self.buffer = GroupBuffer(
            groups_per_step=GROUPS_PER_STEP,
            max_staleness=0,
            window_fraction=1.0,
            keeps_zero_variance_groups=False,
        )
        state = self.state
        self.admission = GroupAdmission(GROUPS_PER_STEP, 0)
        num_kept = self.buffer.restore(state.buffered_groups, state.counts, state.step)
        self.admission.num_admitted = state.step * GROUPS_PER_STEP + num_kept
        self.waiting = list(state.unfinished_groups)
        self.playing: dict[int, GroupSpec] = {}

    def save_and_resume(self) -> None:
        contents = self.buffer.copy_state()
        self.state.unfinished_groups = [*self.playing.values(), *self.waiting]
        self.state.buffered_groups, self.state.counts = contents.groups, contents.counts
        self.state = RunState.model_validate_json(self.state.model_dump_json())
        self.start()

    def play_step(self, order: random.Random, *, stop_after: int | None = None) -> list[int]:
        """Play one step and return the indices of its batch; resume after `stop_after` groups."""
        num_finished = 0
        while True:
            while self.admission.compute_capacity(self.state.step):
                spec = self.waiting.pop(0) if self.waiting else self.mixture.take_next_group()
                self.admission.admit(1)
                self.playing[spec.index] = spec
                final = {spec.index} if spec.is_final else set()
                self.buffer.begin([spec.index], self.state.step, final)
            groups = self.buffer.take(self.state.step)
            if groups:
                self.counts = sum_counts(self.buffer.take_counts().values())
                self.state.step += 1
                self.mixture.start_step()
                return [group.index for group in groups]
            if num_finished == stop_after:
                self.save_and_resume()
                num_finished += 1
                continue
            self.finish_group(self.playing.pop(order.choice(sorted(self.playing))))
            num_finished += 1

    def finish_group(self, spec: GroupSpec) -> None:
        rewards = (1, -1) if self.has_variance(spec.index) else (1, 1)
        group = make_group(*rewards, index=spec.index, version=self.state.step)
        for _ in self.buffer.put([group]):
            self.admission.release(1)
            self.waiting.append(self.mixture.replace_group(spec))


@pytest.mark.parametrize("num_batches", [2, 3, 5])
def test_step_without_variance_plays_at_most_the_limit(num_batches: int) -> None:
    sampling = Sampling(lambda index: False, num_batches=num_batches)
    for _ in range(3):
        assert len(sampling.play_step(random.Random(1))) == GROUPS_PER_STEP
        counts = sampling.counts
        assert counts.num_groups == num_batches * GROUPS_PER_STEP
        assert counts.num_replaced_groups == (num_batches - 1) * GROUPS_PER_STEP
        assert counts.num_kept_groups == GROUPS_PER_STEP


def test_all_groups_have_variance_if_the_limit_allows_it() -> None:
    sampling = Sampling(lambda index: index % 2 == 0)
    for _ in range(4):
        batch = sampling.play_step(random.Random(2))
        assert all(index % 2 == 0 for index in batch)
        assert sampling.counts.num_kept_groups == 0


@pytest.mark.parametrize("divisor", [3, 8, 100])
def test_batches_do_not_depend_on_the_order_in_which_groups_finish(divisor: int) -> None:
    batches_by_order = []
    for order_seed in range(8):
        sampling, order = Sampling(lambda index: index % divisor == 1), random.Random(order_seed)
        batches_by_order.append([sampling.play_step(order) for _ in range(4)])
    assert all(batches == batches_by_order[0] for batches in batches_by_order)


@pytest.mark.parametrize("stop_after", [0, 1, 7, 11, 13, 16])
def test_resumed_step_has_the_same_batch(stop_after: int) -> None:
    order = random.Random(3)
    reference = Sampling(lambda index: index % 8 == 1)
    expected = [reference.play_step(order) for _ in range(3)]
    resumed = Sampling(lambda index: index % 8 == 1)
    batches = [resumed.play_step(order, stop_after=stop_after) for _ in range(3)]
    assert batches == expected
    assert resumed.counts == reference.counts


def test_limit_is_shared_in_proportion_to_the_weights() -> None:
    environments = {"often": {"weight": 2.0}, "seldom": {"weight": 1.0}}
    sections = {"environments": environments, "training": {"groups_per_step": 6}}
    mixture = Mixture(LanguageModelRun.model_validate(sections), MixtureState())
    for name, num_unlimited in (("often", 4), ("seldom", 2)):
        spec = GroupSpec(0, name, (0, 0))
        groups = [mixture.replace_group(spec) for _ in range(num_unlimited + 2)]
        assert [group.is_final for group in groups] == [False] * num_unlimited + [True] * 2
    mixture.start_step()
    assert not mixture.replace_group(GroupSpec(0, "often", (0, 0))).is_final


def test_final_group_that_is_lost_or_void_is_still_replaced() -> None:
    buffer = GroupBuffer(
        groups_per_step=1, max_staleness=0, window_fraction=1.0, keeps_zero_variance_groups=False
    )
    buffer.begin([0], 0, {0})
    assert [refusal.index for refusal in buffer.put([make_group(1, None)])] == [0]
    assert buffer.counts["coins"].num_kept_groups == 0
