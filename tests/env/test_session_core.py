"""`SessionCore` without a wire: step order, capacity, lifetime and errors of sessions."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import LocalHost, make_local_host
from ludus.env.sessions.interface import Connection, OpenArgs
from ludus.env.sessions.options import ServerOptions
from ludus.env.sessions.tombstones import MAX_REMEMBERED_SESSIONS
from ludus.proto.errors import (
    ActionParseError,
    CallTimeoutError,
    CapacityError,
    EnvError,
    EpisodeStateError,
    ErrorCode,
    ExecutionError,
    IllegalActionError,
    InvalidCallError,
    SessionLostError,
)
from tests.env.counting_env import CountAction, CountingEnv, ThreadedCountingEnv
from tests.env.polling import CoreClock, find_detached_sessions, wait_for_sessions

pytestmark = pytest.mark.asyncio

ADD_1 = b'{"add": 1}'


def make_core(factory, **options) -> SessionCore:
    return SessionCore(make_local_host(factory), ServerOptions(**options))


async def open_session(
    core: SessionCore,
    reset: ResetArgs | None = None,
    *,
    connection: Connection | None = None,
    **args,
) -> tuple[str, EncodedResult | None]:
    session = await core.open(OpenArgs(reset, **args), connection)
    return session.session_id, session.first_result


@pytest.fixture(params=[CountingEnv, ThreadedCountingEnv])
def factory(request):
    return request.param


async def test_repeated_step_returns_the_first_result_without_stepping(factory) -> None:
    core = make_core(factory)
    session_id, _ = await open_session(core, ResetArgs(seed=1))
    first_result = await core.step(session_id, ADD_1, 1)
    repeated_result = await core.step(session_id, b'{"add": 3}', 1)
    assert repeated_result is first_result
    assert b'"total":1' in await core.state(session_id)


async def test_a_step_out_of_order_is_a_conflict(factory) -> None:
    core = make_core(factory)
    session_id, _ = await open_session(core, ResetArgs())
    for step_index in (2, 7):
        with pytest.raises(EpisodeStateError, match="expected step 1") as exc_info:
            await core.step(session_id, ADD_1, step_index)
        assert exc_info.value.code is ErrorCode.STEP_CONFLICT


async def test_steps_without_an_index_always_advance_the_episode(factory) -> None:
    core = make_core(factory)
    session_id, _ = await open_session(core, ResetArgs())
    assert [(await core.step(session_id, ADD_1)).step_index for _ in range(3)] == [1, 2, 3]


async def test_step_before_reset_or_after_the_episode_end_fails(factory) -> None:
    core = make_core(factory)
    session_id, first_result = await open_session(core)
    assert first_result is None
    with pytest.raises(EpisodeStateError) as early_error:
        await core.step(session_id, ADD_1)
    await core.reset(session_id, ResetArgs())
    assert (await core.step(session_id, b'{"add": 7}', 1)).truncated
    with pytest.raises(EpisodeStateError) as late_error:
        await core.step(session_id, ADD_1, 2)
    codes = (early_error.value.code, late_error.value.code)
    assert codes == (ErrorCode.NOT_RESET, ErrorCode.EPISODE_OVER)
    assert (await core.reset(session_id, ResetArgs())).step_index == 0


@pytest.mark.parametrize(
    ("action", "error", "code", "message"),
    [
        (b'{"add": "x"}', InvalidCallError, ErrorCode.VALIDATION_ERROR, "add: .* got 'x'"),
        (b'{"sub": 1}', InvalidCallError, ErrorCode.VALIDATION_ERROR, "add: Field required"),
        (b"{", InvalidCallError, ErrorCode.INVALID_JSON, "Invalid JSON"),
        ("HIT", ActionParseError, ErrorCode.ACTION_PARSE_ERROR, "'HIT'"),
        (b'{"add": 0}', IllegalActionError, ErrorCode.ILLEGAL_ACTION, "add 1, 2 or 3"),
        (b'{"add": 13}', ExecutionError, ErrorCode.EXECUTION_ERROR, "ValueError: unlucky"),
    ],
)
async def test_failed_step_has_a_code_and_the_session_continues(
    factory, action, error, code, message
) -> None:
    core = make_core(factory)
    session_id, _ = await open_session(core, ResetArgs())
    with pytest.raises(error, match=message) as exc_info:
        await core.step(session_id, action, 1)
    assert exc_info.value.code is code
    assert (await core.step(session_id, ADD_1, 1)).reward == 1.0


async def test_text_is_parsed_by_the_text_renderer(factory) -> None:
    core = make_core(factory)
    session_id, first_result = await open_session(core, ResetArgs())
    assert b"Count to the end" in first_result.text.messages_json
    second_result = await core.step(session_id, "ADD 3", 1)
    assert second_result.reward == 3.0
    assert second_result.text.legal_answers == ["ADD 1", "ADD 2", "ADD 3"]


async def test_open_beyond_capacity_is_refused(factory) -> None:
    core = make_core(factory, max_sessions=2)
    first_id, _ = await open_session(core)
    await open_session(core)
    with pytest.raises(CapacityError, match="2/2 sessions active"):
        await open_session(core)
    await core.close(first_id)
    await open_session(core)


async def test_concurrently_opening_sessions_count_towards_capacity() -> None:
    core = make_core(ThreadedCountingEnv, max_sessions=3)
    results = await asyncio.gather(*(open_session(core) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(result, CapacityError) for result in results) == 2
    assert core.load.num_sessions == 3


async def test_a_failed_reset_frees_the_slot(factory) -> None:
    core = make_core(factory, max_sessions=1)
    with pytest.raises(InvalidCallError, match="options colour; its options are: note, start"):
        await open_session(core, ResetArgs(options={"colour": 1}))
    assert core.load.num_sessions == 0


class BadOptionEnv(CountingEnv):
    """An environment that accepts any option and reports a bad option at the first reset."""

    start: object = "3"

    @property
    def options(self):
        return {"start": self.start}

    def reset(self, *, seed=None):
        return super().reset(seed=seed, start=self.start + 1)


async def test_failed_reset_reports_environment_options() -> None:
    core = make_core(BadOptionEnv)
    with pytest.raises(ExecutionError) as exc_info:
        await open_session(core, ResetArgs(seed=1))
    assert str(exc_info.value).startswith("reset failed with TypeError: can only concatenate str")
    assert "built with {'start': '3'}; check the type of each option" in str(exc_info.value)


async def test_failed_factory_raises_a_factory_error() -> None:
    calls = iter([CountingEnv, None])

    def factory():
        return next(calls)()

    core = make_core(factory)
    with pytest.raises(ExecutionError, match="'factory' failed") as exc_info:
        await open_session(core)
    assert exc_info.value.code is ErrorCode.FACTORY_ERROR
    assert core.load.num_sessions == 0


async def test_close_when_done_frees_the_slot_and_repeats_the_last_result(factory) -> None:
    core = make_core(factory)
    session_id, _ = await open_session(core, ResetArgs(), close_when_done=True)
    last_result = await core.step(session_id, b'{"add": 7}', 1)
    assert core.load.num_sessions == 0
    assert await core.step(session_id, b'{"add": 7}', 1) is last_result
    with pytest.raises(SessionLostError, match="its episode ended"):
        await core.step(session_id, ADD_1, 2)


async def test_calls_to_an_ended_session_report_the_reason(factory) -> None:
    core = make_core(factory)
    session_id, _ = await open_session(core, ResetArgs())
    await core.close(session_id)
    await core.close(session_id)
    with pytest.raises(SessionLostError, match="it was closed"):
        await core.state(session_id)
    with pytest.raises(SessionLostError, match="has no session with this id"):
        await core.step("no-such-session", ADD_1)


async def test_idle_session_is_closed_and_active_session_is_not(
    factory, core_clock: CoreClock
) -> None:
    core = make_core(factory, idle_timeout_s=60)
    sweeper = asyncio.create_task(core.close_idle_forever())
    idle_id, _ = await open_session(core, ResetArgs())
    active_id, _ = await open_session(core, ResetArgs())
    core_clock.advance(40)
    await core.state(active_id)
    core_clock.advance(20)
    await wait_for_sessions(core, 1)
    sweeper.cancel()
    await core.state(active_id)
    with pytest.raises(SessionLostError, match="idle for 60 s"):
        await core.step(idle_id, ADD_1, 1)


async def test_sessions_close_when_the_connection_ends_even_during_open() -> None:
    core = make_core(ThreadedCountingEnv)
    connection = Connection()
    await open_session(core, connection=connection)
    other_id, _ = await open_session(core, ResetArgs())
    open_task = asyncio.create_task(open_session(core, connection=connection))
    await asyncio.sleep(0)
    core.release(connection)
    await open_task
    assert core.load.num_sessions == 1
    assert (await core.step(other_id, ADD_1)).step_index == 1


async def test_attached_session_lingers_after_the_second_connection_ends(
    core_clock,
) -> None:
    core = make_core(CountingEnv)
    first_connection, second_connection = Connection(), Connection()
    session_id, _ = await open_session(
        core, ResetArgs(), connection=first_connection, linger_s=0.01
    )
    core.release(first_connection)
    assert find_detached_sessions(core) == {session_id}
    core.attach([session_id], second_connection)
    assert (find_detached_sessions(core), second_connection.session_ids) == (set(), {session_id})
    await core.step(session_id, ADD_1, 1)
    core.release(second_connection)
    assert find_detached_sessions(core) == {session_id}
    sweeper = asyncio.create_task(core.close_idle_forever())
    async with asyncio.timeout(60):
        while core.load.num_sessions:
            await asyncio.sleep(0.01)
    sweeper.cancel()
    with pytest.raises(SessionLostError, match=r"connection that opened it ended 0\.01 s ago"):
        await core.step(session_id, ADD_1, 2)
    assert find_detached_sessions(core) == set()


async def test_sessions_without_linger_are_not_attached() -> None:
    core = make_core(CountingEnv)
    first_connection, next_connection, ended_connection = Connection(), Connection(), Connection()
    owned_id, _ = await open_session(core, connection=first_connection, linger_s=9)
    unowned_id, _ = await open_session(core)
    brief_id, _ = await open_session(core, connection=first_connection)
    core.attach([unowned_id, brief_id, "unknown"], next_connection)
    assert next_connection.session_ids == set()
    await core.detach(brief_id, next_connection)
    assert core.load.num_sessions == 3
    await core.detach(owned_id, first_connection)
    core.release(ended_connection)
    core.attach([owned_id], ended_connection)
    assert (find_detached_sessions(core), ended_connection.session_ids) == ({owned_id}, set())
    core.attach([owned_id], next_connection)
    await core.close(owned_id)
    assert (find_detached_sessions(core), next_connection.session_ids) == (set(), set())


async def test_session_lingers_only_after_the_last_attached_connection_ends() -> None:
    core = make_core(CountingEnv)
    first_connection, next_connection, last_connection = Connection(), Connection(), Connection()
    session_id, _ = await open_session(core, connection=first_connection, linger_s=9)
    core.attach([session_id], next_connection)
    core.release(first_connection)
    assert (find_detached_sessions(core), next_connection.session_ids) == (set(), {session_id})
    await core.detach(session_id, last_connection)
    assert find_detached_sessions(core) == set()
    await core.detach(session_id, next_connection)
    assert (find_detached_sessions(core), next_connection.session_ids) == ({session_id}, set())


async def test_calls_of_one_session_never_overlap() -> None:
    overlaps = []
    lock = threading.Lock()

    class ExclusiveEnv(ThreadedCountingEnv):
        def step(self, action: CountAction):
            if not lock.acquire(blocking=False):
                overlaps.append(action.add)
                return super().step(action)
            time.sleep(0.002)
            lock.release()
            return super().step(action)

    core = make_core(ExclusiveEnv)
    session_id, _ = await open_session(core, ResetArgs())
    calls = [core.step(session_id, b'{"add": %d}' % index, index) for index in (1, 2, 3, 4)]
    results = await asyncio.gather(*calls)
    assert overlaps == []
    assert [result.step_index for result in results] == [1, 2, 3, 4]


async def test_sessions_step_concurrently_in_threads() -> None:
    barrier = threading.Barrier(4, timeout=60)

    class BarrierEnv(ThreadedCountingEnv):
        def step(self, action: CountAction):
            barrier.wait()
            return super().step(action)

    core = make_core(BarrierEnv)
    session_ids = [(await open_session(core, ResetArgs()))[0] for _ in range(4)]
    results = await asyncio.gather(*(core.step(session_id, ADD_1) for session_id in session_ids))
    assert [result.reward for result in results] == [1.0] * 4


async def test_next_step_waits_for_the_thread_of_a_cancelled_call() -> None:
    core = make_core(ThreadedCountingEnv)
    session_id, _ = await open_session(core, ResetArgs())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(core.step(session_id, b'{"add": 99}', 1), 0.05)
    result = await core.step(session_id, ADD_1, 2)
    assert b'"total":100' in result.observation_json


async def test_step_over_the_time_limit_ends_the_session() -> None:
    core = make_core(ThreadedCountingEnv)
    session_id, _ = await open_session(core, ResetArgs())
    with pytest.raises(CallTimeoutError, match=r"longer than 0\.05 s"):
        await core.step(session_id, b'{"add": 99}', 1, timeout_s=0.05)
    assert core.load.num_sessions == 0
    await core.shut_down(grace_s=2.0)


async def test_every_environment_is_closed_once(factory) -> None:
    environments = []

    class CloseCountingEnv(factory):
        def __init__(self):
            super().__init__()
            self.num_closed = 0
            environments.append(self)

        def close(self):
            self.num_closed += 1

    core = make_core(CloseCountingEnv, max_sessions=2)
    first_id, _ = await open_session(core, ResetArgs())
    await open_session(core, ResetArgs(), close_when_done=True)
    await core.close(first_id)
    with pytest.raises(EnvError):
        await open_session(core, ResetArgs(options={"colour": 1}))
    await core.shut_down()
    assert [environment.num_closed for environment in environments] == [1] * 4


async def test_session_ids_are_unpredictable() -> None:
    core = make_core(CountingEnv)
    session_ids = {(await open_session(core))[0] for _ in range(100)}
    assert len(session_ids) == 100
    assert min(map(len, session_ids)) >= 22


async def test_requested_episode_id_is_in_the_state(factory) -> None:
    core = make_core(factory)
    session_id, _ = await open_session(core)
    assert await core.state(session_id) == b'{"episode_id":null,"step_count":0}'
    await core.reset(session_id, ResetArgs(episode_id="E"))
    assert await core.state(session_id) == b'{"episode_id":"E","step_count":0,"total":0}'


class SessionLosingHost(LocalHost):
    """A host that loses each session after the reset, before the client receives the session id."""

    async def open(self, session_id, *, with_text, on_lost):
        session = await super().open(session_id, with_text=with_text, on_lost=on_lost)
        reset = session.reset

        async def reset_and_lose_session(args):
            result = await reset(args)
            on_lost("its worker was killed by SIGKILL")
            return result

        return SimpleNamespace(
            last_result=None,
            inline_session=None,
            remaining_s=session.remaining_s,
            reset=reset_and_lose_session,
            close=session.close,
            kill=session.kill,
        )


@pytest.mark.slow
async def test_session_lost_during_open_frees_its_slot() -> None:
    spec = make_local_host(ThreadedCountingEnv).description
    core = SessionCore(
        SessionLosingHost(ThreadedCountingEnv, spec, 4), ServerOptions(max_sessions=1)
    )
    for _ in range(MAX_REMEMBERED_SESSIONS + 3):
        with pytest.raises(SessionLostError, match="killed by SIGKILL"):
            await open_session(core, ResetArgs())
    assert core.load.num_sessions == 0
    assert len(core.tombstones) <= MAX_REMEMBERED_SESSIONS
