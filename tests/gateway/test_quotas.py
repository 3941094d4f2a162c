"""Session and rate quotas of tenants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.proto.errors import InvalidCallError, RateLimitError
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.tenancy.tenants import Tenant, TenantLimits
from tests.gateway.clock import Clock


def make_tenant(name: str = "alice", **limits: float) -> Tenant:
    return Tenant(name, limits=TenantLimits(**limits))  # type: ignore[arg-type]


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock)


def test_sessions_are_reserved_atomically_and_released(quotas: Quotas) -> None:
    alice = make_tenant(max_sessions=4)
    quotas.reserve(alice, 3)
    with pytest.raises(RateLimitError, match=r"2 more sessions, has 3 .*at most 4") as error:
        quotas.reserve(alice, 2)
    assert error.value.retry_after_s > 0
    assert quotas.count_sessions(alice) == 3
    quotas.reserve(alice)
    quotas.release(alice, 2)
    quotas.reserve(alice, 2)
    assert quotas.count_sessions(alice) == 4


def test_group_larger_than_the_quota_gets_no_retry_delay(quotas: Quotas) -> None:
    with pytest.raises(InvalidCallError, match=r"5 sessions together .*at most 4"):
        quotas.reserve(make_tenant(max_sessions=4), 5)


def test_tenants_have_separate_quotas(quotas: Quotas) -> None:
    quotas.reserve(make_tenant("alice", max_sessions=1))
    quotas.reserve(make_tenant("bob", max_sessions=1))
    with pytest.raises(RateLimitError):
        quotas.reserve(make_tenant("bob", max_sessions=1))


def test_sessions_reserved_before_a_limit_count_against_it(quotas: Quotas) -> None:
    quotas.reserve(make_tenant(), 5)
    with pytest.raises(RateLimitError):
        quotas.reserve(make_tenant(max_sessions=5))


def test_extra_releases_do_not_increase_the_quota(quotas: Quotas) -> None:
    alice = make_tenant(max_sessions=1)
    quotas.release(alice, 7)
    quotas.reserve(alice)
    quotas.release(alice, 7)
    quotas.reserve(alice)
    with pytest.raises(RateLimitError):
        quotas.reserve(alice)


def test_open_rate_is_limited_after_a_one_second_burst(quotas: Quotas, clock: Clock) -> None:
    alice = make_tenant(opens_per_s=4)
    for _ in range(4):
        quotas.reserve(alice)
    with pytest.raises(RateLimitError, match="limit of 4 opens per second") as error:
        quotas.reserve(alice)
    assert error.value.retry_after_s == pytest.approx(0.25)
    clock.now_s += 0.25
    quotas.reserve(alice)
    assert quotas.count_sessions(alice) == 5


def test_refused_open_consumes_no_quota(quotas: Quotas) -> None:
    alice = make_tenant(max_sessions=1, opens_per_s=2)
    quotas.reserve(alice)
    for _ in range(5):
        with pytest.raises(RateLimitError, match="requested 1 more sessions"):
            quotas.reserve(alice)
    quotas.release(alice)
    quotas.reserve(alice)  # the rate limit allows a second open in this second


def test_rate_below_one_allows_single_opens(quotas: Quotas, clock: Clock) -> None:
    alice = make_tenant(opens_per_s=0.1)
    quotas.reserve(alice)
    with pytest.raises(RateLimitError) as error:
        quotas.reserve(alice)
    assert error.value.retry_after_s == pytest.approx(10.0)
    clock.now_s += 10.0
    quotas.reserve(alice)


def test_group_larger_than_the_burst_delays_later_opens(quotas: Quotas, clock: Clock) -> None:
    alice = make_tenant(opens_per_s=100)
    quotas.reserve(alice, 256)
    with pytest.raises(RateLimitError) as error:
        quotas.reserve(alice)
    assert error.value.retry_after_s == pytest.approx(1.57)
    clock.now_s += 1.57
    quotas.reserve(alice)


def test_steps_have_a_separate_rate(quotas: Quotas, clock: Clock) -> None:
    alice = make_tenant(opens_per_s=1, steps_per_s=2)
    quotas.reserve(alice)
    for _ in range(2):
        quotas.count_step(alice)
    with pytest.raises(RateLimitError, match="limit of 2 steps per second"):
        quotas.count_step(alice)
    clock.now_s += 0.5
    quotas.count_step(alice)


def test_steps_of_a_tenant_without_limits_are_never_refused(quotas: Quotas) -> None:
    for _ in range(1000):
        quotas.count_step(make_tenant())


@pytest.mark.slow
@given(
    st.floats(0.1, 1e4),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500)), min_size=1, max_size=60),
)
def test_rate_is_limited_for_groups_of_any_size(
    rate_per_s: float, groups: list[tuple[float, int]]
) -> None:
    clock = Clock()
    quotas = Quotas(clock)
    alice = make_tenant(opens_per_s=rate_per_s)
    start_s, num_opens, last_group_size = clock.now_s, 0, 0
    for pause_s, size in groups:
        clock.now_s += pause_s
        try:
            quotas.reserve(alice, size)
        except RateLimitError as error:
            clock.now_s += error.retry_after_s
            quotas.reserve(alice, size)  # succeeds after the retry delay
        num_opens, last_group_size = num_opens + size, size
    max_burst = max(1.0, rate_per_s)
    max_opens = (clock.now_s - start_s) * rate_per_s + max_burst + last_group_size
    assert num_opens <= max_opens * (1 + 1e-6) + 1e-6
