"""The rules of the wire for every server, as functions that raise BrokenRuleError.

The rules only use a client, so they apply to local and remote servers, gateways and OpenEnv's
servers. Features that OpenEnv's protocol does not have are reported as not offered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ludus.env.check.wire_players import (
    MAX_OPENED,
    CheckedServer,
    NotOfferedError,
    WirePlayer,
    encode_result,
)
from ludus.env.client.session import AsyncSession, encode_action
from ludus.env.contract.rules import expect, expect_same
from ludus.env.contract.schema import find_fault
from ludus.env.types import StepResult
from ludus.proto.errors import EnvError, ErrorCode

WireRule = Callable[[CheckedServer], Awaitable[None]]

_GARBAGE = "\x00 no player would ever answer this \x00"
_NUM_PARALLEL = 8
_NUM_MORE_SEEDS = 16
_MALFORMED_CODES = (ErrorCode.VALIDATION_ERROR, ErrorCode.INVALID_JSON, ErrorCode.ILLEGAL_ACTION)
_UPSTREAM_MALFORMED_CODES = (*_MALFORMED_CODES, ErrorCode.EXECUTION_ERROR)


async def a_full_server_refuses_with_a_code(checked: CheckedServer) -> None:
    """Check that a full server refuses with CAPACITY_REACHED, and accepts sessions afterwards."""
    await checked.measure_capacity()
    if checked.refusal is None:
        raise NotOfferedError(f"a limit of at most {MAX_OPENED} sessions")
    code = checked.refusal.code
    expect(code == ErrorCode.CAPACITY_REACHED, "the code CAPACITY_REACHED", code)
    expect(checked.capacity > 0, "room for at least one session", "none")
    session = await _open_patiently(checked)
    await session.close()


async def the_server_describes_its_schemas(checked: CheckedServer) -> None:
    """Check that the schemas of actions and observations are JSON schemas of objects."""
    description = checked.description
    for name in ("action", "observation"):
        schema = getattr(description, f"{name}_schema")
        is_object = schema.get("type") == "object" or "properties" in schema
        expect(is_object, f"a JSON schema of an object for the {name}", schema or "nothing")
    expect(bool(description.name), "a name", "none")


async def same_seed_and_actions_give_the_same_episode(checked: CheckedServer) -> None:
    """Check that an episode repeats in another session of the server."""
    for seed in checked.seeds:
        first_episode = await checked.play(seed, policy_seed=seed)
        again = await checked.play(seed, first_episode.actions)
        expect_same(first_episode.record, again.record, f"seed {seed}")


async def seeds_are_not_ignored(checked: CheckedServer) -> None:
    """Check that seeds determine the randomness of an environment, if it has any."""
    if len(checked.seeds) < 2:
        return
    seeded: set[bytes] = set()
    # If there are few possible episodes, several seeds may give the same one.
    for seed in [*checked.seeds, *range(1000, 1000 + _NUM_MORE_SEEDS)]:
        seeded.add(b"".join((await checked.play(seed)).record))
        if len(seeded) > 1:
            return
    unseeded = {b"".join((await checked.play(None)).record) for _ in checked.seeds}
    got = f"equal episodes for seeds {list(checked.seeds)} and different ones without a seed"
    expect(unseeded == seeded, "episodes that depend on the seed", got)


async def parallel_sessions_are_independent(checked: CheckedServer) -> None:
    """Check that parallel episodes are equal to the same episodes played separately."""
    num_parallel = _require_two_sessions(checked)
    separate = [await checked.play(seed, policy_seed=seed) for seed in checked.seeds[:2]]
    references = [separate[index % len(separate)] for index in range(num_parallel)]
    seeds = [checked.seeds[index % len(separate)] for index in range(num_parallel)]
    parallel = await asyncio.gather(*(checked.start_player(seed) for seed in seeds))
    pairs = list(zip(references, parallel, strict=True))
    await asyncio.gather(*(player.finish(reference.actions) for reference, player in pairs))
    for reference, player in pairs:
        expect_same(reference.record, player.record, f"one of {num_parallel} parallel sessions")


async def a_second_reset_starts_again(checked: CheckedServer) -> None:
    """Check that a reset removes every trace of the previous episode."""
    seed = checked.seeds[0]
    player = await checked.start_player(seed)
    await player.finish()
    again = encode_result(await player.session.reset(seed=seed))
    expect(again == player.record[0], player.record[0].decode(), again.decode())


async def a_group_starts_with_equal_observations(checked: CheckedServer) -> None:
    """Check that all sessions of a group return equal first observations."""
    size = min(_require_two_sessions(checked), 4)
    group = await checked.client.open_group(size, seed=checked.seeds[0])
    for session, _ in group:
        await session.close()
    first_results = {encode_result(first_result) for _, first_result in group}
    text = f"{size} equal first results in a group"
    expect(len(first_results) == 1, text, f"{len(first_results)} different ones")


async def a_step_before_the_reset_is_refused(checked: CheckedServer) -> None:
    """Check that a step before the reset is refused with NOT_RESET."""
    checked.require_extras("rule for it")
    reference = await checked.play(checked.seeds[0])
    expect(bool(reference.actions), "an episode of at least one step", "none")
    async with await checked.client.open_session() as session:
        await _expect_error(_step(session, reference.actions[0]), ErrorCode.NOT_RESET)


async def a_step_after_the_end_is_refused(checked: CheckedServer) -> None:
    """Check that a step after the end is refused with EPISODE_OVER."""
    checked.require_extras("rule for it")
    for seed in checked.seeds:
        player = await checked.start_player(seed)
        await player.finish()
        if player.is_over and player.actions:
            await _expect_error(_step(player.session, player.actions[-1]), ErrorCode.EPISODE_OVER)
            return
        await checked.close()
    raise NotOfferedError(f"no episode ended within {checked.num_steps} steps; increase --steps")


async def malformed_actions_are_refused_and_change_nothing(checked: CheckedServer) -> None:
    """Check that malformed actions are refused with a code, and that the episode continues."""
    seed = checked.seeds[0]
    reference = await checked.play(seed)
    session, _ = await checked.open(seed)
    codes = _UPSTREAM_MALFORMED_CODES if checked.is_upstream else _MALFORMED_CODES
    required_fields = checked.description.action_schema.get("required", [])
    malformed: list[dict[str, object]] = [{"no_field_of_any_action": 1}]
    malformed += [{name: {"not": ["this"]} for name in required_fields}] if required_fields else []
    for action in malformed:
        await _expect_error(session.step(action), *codes)
    if checked.description.has_text_view and not checked.description.takes_any_text:
        await _expect_error(session.step(text=_GARBAGE), ErrorCode.ACTION_PARSE_ERROR)
    await _expect_continues(session, reference, "bad input")


async def a_wrong_step_number_is_refused(checked: CheckedServer) -> None:
    """Check that a wrong step number is refused with STEP_CONFLICT, and the episode continues."""
    checked.require_extras("step numbers")
    reference = await checked.play(checked.seeds[0])
    session, _ = await checked.open(checked.seeds[0])
    encoded_action = encode_action(reference.actions[0])
    await _expect_error(session.wire.step(encoded_action, 7), ErrorCode.STEP_CONFLICT)
    await _expect_continues(session, reference, "a wrong step number")


async def a_repeated_step_returns_its_first_result(checked: CheckedServer) -> None:
    """Check that a repeated step number is not taken twice."""
    checked.require_extras("step numbers")
    reference = await checked.play(checked.seeds[0])
    session, _ = await checked.open(checked.seeds[0])
    for number, action in enumerate(reference.actions, 1):
        encoded_action = encode_action(action)
        for _ in range(2):
            actual = encode_result(await session.wire.step(encoded_action, number))
            expected = reference.record[number]
            expect(actual == expected, f"step {number} to be {expected.decode()}", actual.decode())


async def a_closed_session_is_lost(checked: CheckedServer) -> None:
    """Check that a call of a closed session is refused with SESSION_LOST."""
    reference = await checked.play(checked.seeds[0])
    session, _ = await checked.open(checked.seeds[0])
    await session.close()
    encoded_action = encode_action(reference.actions[0])
    await _expect_error(session.wire.step(encoded_action, 1), ErrorCode.SESSION_LOST)


async def observations_fit_their_schema(checked: CheckedServer) -> None:
    """Check that the observations of an episode fit the described schema."""
    schema = checked.description.observation_schema
    for result in (await checked.play(checked.seeds[0])).results:
        fault = find_fault(result.observation, schema)
        expect(not fault, "observations that fit their schema", fault)


async def the_state_fits_its_schema(checked: CheckedServer) -> None:
    """Check that the state fits its schema before and after a step."""
    player = await checked.start_player(checked.seeds[0])
    for _ in range(2):
        state = await player.session.state()
        fault = find_fault(state, checked.description.state_schema)
        expect(not fault, "a state that fits its schema", fault)
        await player.advance()


async def actions_of_the_schema_are_accepted_or_refused(checked: CheckedServer) -> None:
    """Check that an action that fits the schema never fails with EXECUTION_ERROR."""
    for seed in checked.seeds:
        player = await checked.play(seed, policy_seed=seed + 1)
        codes = {str(error.code) for error in player.refusals}
        failure_codes = codes & {str(ErrorCode.EXECUTION_ERROR)}
        expect(not failure_codes, "results or refusals", f"a failure: {player.refusals}")


async def every_legal_answer_is_accepted(checked: CheckedServer) -> None:
    """Check that each legal answer of an observation is accepted as an action."""
    first_result = (await checked.play(checked.seeds[0])).results[0]
    if first_result.text is None or not first_result.text.legal_answers:
        raise NotOfferedError("legal answers as text")
    for answer in first_result.text.legal_answers[:_NUM_PARALLEL]:
        session, _ = await checked.open(checked.seeds[0])
        await session.step(text=answer)
        await checked.close()


async def flags_and_rewards_are_valid(checked: CheckedServer) -> None:
    """Check that a reset returns no reward, and that the last result alone ends the episode."""
    player = await checked.play(checked.seeds[0])
    first_result = player.results[0]
    expect(not first_result.done, "a running episode after a reset", "an episode that is over")
    if not checked.is_upstream:
        expect(first_result.reward is None, "no reward after a reset", first_result.reward)
    early = [result for result in player.results[:-1] if result.done]
    expect(not early, "no result after the end of an episode", early)


WIRE_RULES: dict[str, WireRule] = {
    rule.__name__: rule
    for rule in (
        a_full_server_refuses_with_a_code,  # must be first, because it measures the capacity
        the_server_describes_its_schemas,
        flags_and_rewards_are_valid,
        same_seed_and_actions_give_the_same_episode,
        seeds_are_not_ignored,
        parallel_sessions_are_independent,
        a_second_reset_starts_again,
        a_group_starts_with_equal_observations,
        a_step_before_the_reset_is_refused,
        a_step_after_the_end_is_refused,
        malformed_actions_are_refused_and_change_nothing,
        a_wrong_step_number_is_refused,
        a_repeated_step_returns_its_first_result,
        a_closed_session_is_lost,
        observations_fit_their_schema,
        the_state_fits_its_schema,
        actions_of_the_schema_are_accepted_or_refused,
        every_legal_answer_is_accepted,
    )
}


def _require_two_sessions(checked: CheckedServer) -> int:
    """Return the number of parallel sessions, which is at least two."""
    if checked.capacity < 2:
        raise NotOfferedError("the server supports one session at a time")
    return min(_NUM_PARALLEL, checked.capacity)


async def _open_patiently(checked: CheckedServer) -> AsyncSession:
    """Open a session, and wait for a server that has not yet noticed that others were closed."""
    session, _ = await checked.client.open(seed=checked.seeds[0], wait_s=2.0)
    return session


def _step(session: AsyncSession, action: object) -> Awaitable[StepResult]:
    if isinstance(action, str):
        return session.step(text=action)
    assert isinstance(action, dict), "actions are text or JSON objects"
    return session.step(action)


async def _expect_error(call: Awaitable[StepResult], *codes: ErrorCode) -> None:
    expected = f"an error with code {' or '.join(codes)}"
    try:
        result = await call
    except EnvError as error:
        expect(error.code in codes, expected, f"{error.code}: {error.message}")
        return
    expect(False, expected, f"a result: {encode_result(result).decode()}")


async def _expect_continues(
    session: AsyncSession, reference: WirePlayer, circumstance: str
) -> None:
    """Check that the episode continues like the reference."""
    for number, action in enumerate(reference.actions[:2], 1):
        actual, expected = encode_result(await _step(session, action)), reference.record[number]
        text = f"an unchanged episode after {circumstance}, step {number} {expected.decode()}"
        expect(actual == expected, text, actual.decode())
