"""Rules for servers, as functions that raise BrokenRuleError.

The rules use only a client, so they apply to local and remote servers, gateways and servers of
OpenEnv. Features that OpenEnv's protocol does not have are reported as not offered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import cycle, islice

from ludus.env.check.wire_players import (
    MAX_SESSIONS,
    CheckedServer,
    NotOfferedError,
    WirePlayer,
    encode_result,
    take_step,
)
from ludus.env.client.session import AsyncSession, encode_action
from ludus.env.contract.rules import expect, expect_same
from ludus.env.contract.schema import find_fault
from ludus.env.types import StepResult
from ludus.proto.errors import EnvError, ErrorCode

WireRule = Callable[[CheckedServer], Awaitable[None]]

_UNPARSABLE_TEXT = "\x00 no player would ever answer this \x00"
_NUM_PARALLEL_SESSIONS = 8
_NUM_EXTRA_SEEDS = 16
_MALFORMED_CODES = (ErrorCode.VALIDATION_ERROR, ErrorCode.INVALID_JSON, ErrorCode.ILLEGAL_ACTION)
_UPSTREAM_MALFORMED_CODES = (*_MALFORMED_CODES, ErrorCode.EXECUTION_ERROR)


async def a_full_server_refuses_with_a_code(server: CheckedServer) -> None:
    """Check that a full server refuses with CAPACITY_REACHED, and accepts sessions afterwards."""
    await server.measure_capacity()
    if server.has_queue:
        raise NotOfferedError("a refusal, because opens wait for a free session")
    if server.capacity_error is None:
        raise NotOfferedError(f"a limit of fewer than {MAX_SESSIONS} sessions")
    code = server.capacity_error.code
    expect(code == ErrorCode.CAPACITY_REACHED, "the code CAPACITY_REACHED", code)
    expect(server.capacity > 0, "room for at least one session", "none")
    # Wait, because the server may not have noticed yet that the other sessions were closed.
    session, _ = await server.client.open(seed=server.seeds[0], wait_s=2.0)
    await session.close()


async def the_server_describes_its_schemas(server: CheckedServer) -> None:
    """Check that the schemas of actions and observations are JSON schemas of objects."""
    description = server.description
    for name in ("action", "observation"):
        schema = getattr(description, f"{name}_schema")
        is_object = schema.get("type") == "object" or "properties" in schema
        expect(is_object, f"a JSON schema of an object for the {name}", schema or "nothing")
    expect(bool(description.name), "a name", "none")


async def same_seed_and_actions_give_the_same_episode(server: CheckedServer) -> None:
    """Check that the same actions give the same episode in another session of the server."""
    for seed in server.seeds:
        first_player = await server.play(seed, policy_seed=seed)
        second_player = await server.play(seed, first_player.actions)
        expect_same(first_player.record, second_player.record, f"seed {seed}")


async def seeds_are_not_ignored(server: CheckedServer) -> None:
    """Check that seeds determine the randomness of an environment, if it has any."""
    if len(server.seeds) < 2:
        return
    seeded_episodes: set[bytes] = set()
    # If there are few possible episodes, several seeds may give the same episode.
    for seed in [*server.seeds, *range(1000, 1000 + _NUM_EXTRA_SEEDS)]:
        seeded_episodes.add(b"".join((await server.play(seed)).record))
        if len(seeded_episodes) > 1:
            return
    unseeded_episodes = {b"".join((await server.play(None)).record) for _ in server.seeds}
    actual_text = f"equal episodes for seeds {list(server.seeds)} and different ones without a seed"
    expect(unseeded_episodes == seeded_episodes, "episodes that depend on the seed", actual_text)


async def parallel_sessions_are_independent(server: CheckedServer) -> None:
    """Check that parallel episodes are equal to the same episodes played separately."""
    num_parallel = _require_two_sessions(server)
    references = {seed: await server.play(seed, policy_seed=seed) for seed in server.seeds[:2]}
    seeds = list(islice(cycle(references), num_parallel))
    players = await asyncio.gather(*map(server.start_player, seeds))
    pairs = [(references[seed], player) for seed, player in zip(seeds, players, strict=True)]
    await asyncio.gather(*(player.play_to_end(reference.actions) for reference, player in pairs))
    for reference, player in pairs:
        circumstance = f"one of {num_parallel} parallel sessions"
        expect_same(reference.record, player.record, circumstance)


async def a_second_reset_starts_again(server: CheckedServer) -> None:
    """Check that a reset removes every trace of the previous episode."""
    seed = server.seeds[0]
    player = await server.start_player(seed)
    await player.play_to_end()
    second_result = encode_result(await player.session.reset(seed=seed))
    first_result = player.record[0]
    expect(second_result == first_result, first_result.decode(), second_result.decode())


async def a_group_starts_with_equal_observations(server: CheckedServer) -> None:
    """Check that all sessions of a group return equal first observations."""
    size = min(_require_two_sessions(server), 4)
    group = await server.client.open_group(size, seed=server.seeds[0])
    for session, _ in group:
        await session.close()
    first_results = {encode_result(first_result) for _, first_result in group}
    expected_text = f"{size} equal first results in a group"
    expect(len(first_results) == 1, expected_text, f"{len(first_results)} different ones")


async def a_step_before_the_reset_is_refused(server: CheckedServer) -> None:
    """Check that a step before the reset is refused with NOT_RESET."""
    server.require_extensions("rule for steps before the reset")
    reference = await server.play(server.seeds[0])
    expect(bool(reference.actions), "an episode of at least one step", "none")
    async with await server.client.open_session() as session:
        await _expect_error(take_step(session, reference.actions[0]), ErrorCode.NOT_RESET)


async def a_step_after_the_end_is_refused(server: CheckedServer) -> None:
    """Check that a step after the end is refused with EPISODE_OVER."""
    server.require_extensions("rule for steps after the end")
    for seed in server.seeds:
        player = await server.start_player(seed)
        await player.play_to_end()
        if player.is_over and player.actions:
            step = take_step(player.session, player.actions[-1])
            await _expect_error(step, ErrorCode.EPISODE_OVER)
            return
        await server.close()
    raise NotOfferedError(f"no episode ended within {server.num_steps} steps; increase --steps")


async def malformed_actions_are_refused_and_change_nothing(server: CheckedServer) -> None:
    """Check that malformed actions are refused with a code, and that the episode continues."""
    seed = server.seeds[0]
    reference = await server.play(seed)
    session, _ = await server.open(seed)
    codes = _UPSTREAM_MALFORMED_CODES if server.is_upstream else _MALFORMED_CODES
    required_fields = server.description.action_schema.get("required", [])
    malformed_actions: list[dict[str, object]] = [{"no_field_of_any_action": 1}]
    if required_fields:
        malformed_actions.append({name: {"not": ["this"]} for name in required_fields})
    for action in malformed_actions:
        await _expect_error(session.step(action), *codes)
    if server.description.has_text_view and not server.description.takes_any_text:
        await _expect_error(session.step(text=_UNPARSABLE_TEXT), ErrorCode.ACTION_PARSE_ERROR)
    await _expect_continues(session, reference, "bad input")


async def a_wrong_step_number_is_refused(server: CheckedServer) -> None:
    """Check that a wrong step number is refused with STEP_CONFLICT, and the episode continues."""
    server.require_extensions("step numbers")
    reference = await server.play(server.seeds[0])
    session, _ = await server.open(server.seeds[0])
    encoded_action = encode_action(reference.actions[0])
    await _expect_error(session.wire_session.step(encoded_action, 7), ErrorCode.STEP_CONFLICT)
    await _expect_continues(session, reference, "a wrong step number")


async def a_repeated_step_returns_its_first_result(server: CheckedServer) -> None:
    """Check that a repeated step number is not taken twice."""
    server.require_extensions("step numbers")
    reference = await server.play(server.seeds[0])
    session, _ = await server.open(server.seeds[0])
    for step_number, action in enumerate(reference.actions, 1):
        encoded_action = encode_action(action)
        for _ in range(2):
            result = encode_result(await session.wire_session.step(encoded_action, step_number))
            expected_result = reference.record[step_number]
            expected_text = f"step {step_number} to be {expected_result.decode()}"
            expect(result == expected_result, expected_text, result.decode())


async def a_closed_session_is_lost(server: CheckedServer) -> None:
    """Check that a call of a closed session is refused with SESSION_LOST."""
    reference = await server.play(server.seeds[0])
    session, _ = await server.open(server.seeds[0])
    await session.close()
    encoded_action = encode_action(reference.actions[0])
    await _expect_error(session.wire_session.step(encoded_action, 1), ErrorCode.SESSION_LOST)


async def observations_fit_their_schema(server: CheckedServer) -> None:
    """Check that the observations of an episode fit the described schema."""
    schema = server.description.observation_schema
    for result in (await server.play(server.seeds[0])).results:
        fault = find_fault(result.observation, schema)
        expect(not fault, "observations that fit their schema", fault)


async def the_state_fits_its_schema(server: CheckedServer) -> None:
    """Check that the state fits its schema before and after a step."""
    player = await server.start_player(server.seeds[0])
    for _ in range(2):
        state = await player.session.state()
        fault = find_fault(state, server.description.state_schema)
        expect(not fault, "a state that fits its schema", fault)
        await player.take_random_step()


async def actions_of_the_schema_are_accepted_or_refused(server: CheckedServer) -> None:
    """Check that an action that fits the schema never fails with EXECUTION_ERROR."""
    for seed in server.seeds:
        player = await server.play(seed, policy_seed=seed + 1)
        has_failed = ErrorCode.EXECUTION_ERROR in {error.code for error in player.refusals}
        expect(not has_failed, "results or refusals", f"a failure: {player.refusals}")


async def every_legal_answer_is_accepted(server: CheckedServer) -> None:
    """Check that each legal answer of an observation is accepted as an action."""
    first_result = (await server.play(server.seeds[0])).results[0]
    if first_result.text is None or not first_result.text.legal_answers:
        raise NotOfferedError("legal answers as text")
    for answer in first_result.text.legal_answers[:_NUM_PARALLEL_SESSIONS]:
        session, _ = await server.open(server.seeds[0])
        await session.step(text=answer)
        await server.close()


async def flags_and_rewards_are_valid(server: CheckedServer) -> None:
    """Check that a reset returns no reward, and that only the last result ends the episode."""
    player = await server.play(server.seeds[0])
    first_result = player.results[0]
    expect(not first_result.done, "a running episode after a reset", "an episode that is over")
    if not server.is_upstream:
        expect(first_result.reward is None, "no reward after a reset", first_result.reward)
    early_results = [result for result in player.results[:-1] if result.done]
    expect(not early_results, "no result after the end of an episode", early_results)


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


def _require_two_sessions(server: CheckedServer) -> int:
    """Return the number of parallel sessions, which is at least two."""
    if server.capacity < 2:
        raise NotOfferedError("the server supports one session at a time")
    return min(_NUM_PARALLEL_SESSIONS, server.capacity)


async def _expect_error(call: Awaitable[StepResult], *codes: ErrorCode) -> None:
    expected_text = f"an error with code {' or '.join(codes)}"
    try:
        result = await call
    except EnvError as error:
        expect(error.code in codes, expected_text, f"{error.code}: {error.message}")
        return
    expect(False, expected_text, f"a result: {encode_result(result).decode()}")


async def _expect_continues(
    session: AsyncSession, reference: WirePlayer, circumstance: str
) -> None:
    """Check that the episode continues like the reference."""
    for step_number, action in enumerate(reference.actions[:2], 1):
        result = encode_result(await take_step(session, action))
        expected_result = reference.record[step_number]
        expected_text = f"an unchanged episode after {circumstance}, step {step_number}"
        expected_text += f" {expected_result.decode()}"
        expect(result == expected_result, expected_text, result.decode())
