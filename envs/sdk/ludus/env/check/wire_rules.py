"""The rules of the wire: what every server owes its clients, each a function that raises.

A server is asked from outside, so the same rules hold for one that is started for the check,
for one that runs elsewhere, for a gateway and for OpenEnv's own servers. What OpenEnv's
protocol does not have is reported as not offered there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ludus.env.check.wire_players import (
    MAX_OPENED,
    CheckedServer,
    NotOfferedError,
    WirePlayer,
    record_of,
)
from ludus.env.client.client import AsyncSession, encode_action
from ludus.env.contract.rules import expect, expect_same
from ludus.env.contract.schema import fault_of
from ludus.env.types import StepResult
from ludus.proto.errors import EnvError, ErrorCode

WireRule = Callable[[CheckedServer], Awaitable[None]]

_GARBAGE = "\x00 no player would ever answer this \x00"
_NUM_TOGETHER = 8
_NUM_MORE_SEEDS = 16
_MALFORMED_CODES = (ErrorCode.VALIDATION_ERROR, ErrorCode.INVALID_JSON, ErrorCode.ILLEGAL_ACTION)
_UPSTREAM_MALFORMED_CODES = (*_MALFORMED_CODES, ErrorCode.EXECUTION_ERROR)


async def a_full_server_refuses_with_a_code(checked: CheckedServer) -> None:
    """CAPACITY_REACHED, and room again once a session is closed."""
    await checked.measure_capacity()
    if checked.refusal is None:
        raise NotOfferedError(f"more than {MAX_OPENED} sessions, which is as far as this looks")
    code = checked.refusal.code
    expect(code == ErrorCode.CAPACITY_REACHED, "the code CAPACITY_REACHED", code)
    expect(checked.capacity > 0, "room for at least one session", "none")
    session = await _open_soon(checked)
    await session.close()


async def the_server_describes_its_schemas(checked: CheckedServer) -> None:
    """Action and observation are JSON schemas of objects."""
    description = checked.description
    for name in ("action", "observation"):
        schema = getattr(description, f"{name}_schema")
        is_object = schema.get("type") == "object" or "properties" in schema
        expect(is_object, f"a JSON schema of an object for the {name}", schema or "nothing")
    expect(bool(description.name), "a name", "none")


async def same_seed_and_actions_give_the_same_episode(checked: CheckedServer) -> None:
    """In another session of the same server."""
    for seed in checked.seeds:
        first = await checked.play(seed, policy_seed=seed)
        again = await checked.play(seed, first.actions)
        expect_same(first.record, again.record, f"seed {seed}")


async def seeds_are_not_ignored(checked: CheckedServer) -> None:
    """Where chance plays a part, seeds decide it; where none does, no seed changes a thing."""
    if len(checked.seeds) < 2:
        return
    seeded: set[bytes] = set()
    for seed in [*checked.seeds, *range(1000, 1000 + _NUM_MORE_SEEDS)]:  # few outcomes may agree
        seeded.add(b"".join((await checked.play(seed)).record))
        if len(seeded) > 1:
            return
    unseeded = {b"".join((await checked.play(None)).record) for _ in checked.seeds}
    found = f"one and the same for all of {list(checked.seeds)}, but others without a seed"
    expect(unseeded == seeded, "episodes that differ with the seed", found)


async def sessions_side_by_side_do_not_disturb_each_other(checked: CheckedServer) -> None:
    """Several sessions on one seed and others on other seeds, all at once."""
    num_together = _at_least_two(checked)
    alone = [await checked.play(seed, policy_seed=seed) for seed in checked.seeds[:2]]
    plan = [alone[index % len(alone)] for index in range(num_together)]
    seeds = [checked.seeds[index % len(alone)] for index in range(num_together)]
    together = await asyncio.gather(*(checked.player(seed) for seed in seeds))
    await asyncio.gather(
        *(player.finish(like.actions) for player, like in zip(together, plan, strict=True))
    )
    for before, after in zip(plan, together, strict=True):
        expect_same(before.record, after.record, f"one of {num_together} sessions side by side")


async def a_second_reset_starts_again(checked: CheckedServer) -> None:
    """What was played before leaves no trace in the session."""
    seed = checked.seeds[0]
    player = await checked.player(seed)
    await player.finish()
    again = record_of(await player.session.reset(seed=seed))
    expect(again == player.record[0], player.record[0].decode(), again.decode())


async def a_group_begins_alike(checked: CheckedServer) -> None:
    """All sessions that are opened together on one seed show the same."""
    size = min(_at_least_two(checked), 4)
    group = await checked.client.open_group(size, seed=checked.seeds[0])
    for session, _ in group:
        await session.close()
    firsts = {record_of(first) for _, first in group}
    expect(len(firsts) == 1, f"{size} sessions that begin alike", f"{len(firsts)} beginnings")


async def a_step_before_the_reset_is_refused(checked: CheckedServer) -> None:
    """With the code NOT_RESET."""
    checked.require_extras("rule for it")
    reference = await checked.play(checked.seeds[0])
    expect(bool(reference.actions), "an episode of at least one step", "none")
    async with await checked.client.open_session() as session:
        await _expect_error(_step(session, reference.actions[0]), ErrorCode.NOT_RESET)


async def a_step_after_the_end_is_refused(checked: CheckedServer) -> None:
    """With the code EPISODE_OVER."""
    checked.require_extras("rule for it")
    for seed in checked.seeds:
        player = await checked.player(seed)
        await player.finish()
        if player.is_over and player.actions:
            await _expect_error(_step(player.session, player.actions[-1]), ErrorCode.EPISODE_OVER)
            return
        await checked.close()
    raise NotOfferedError(f"no episode ended within {checked.num_steps} steps; raise --steps")


async def malformed_actions_are_refused_and_change_nothing(checked: CheckedServer) -> None:
    """With a code for it, and the episode continues as if nothing had been said."""
    seed = checked.seeds[0]
    reference = await checked.play(seed)
    session, _ = await checked.open(seed)
    codes = _UPSTREAM_MALFORMED_CODES if checked.is_upstream else _MALFORMED_CODES
    required = checked.description.action_schema.get("required", [])
    malformed: list[dict[str, object]] = [{"no_field_of_any_action": 1}]
    malformed += [{name: {"not": ["this"]} for name in required}] if required else []
    for action in malformed:
        await _expect_error(session.step(action), *codes)
    if checked.description.has_text_view and not checked.description.takes_any_text:
        await _expect_error(session.step(text=_GARBAGE), ErrorCode.ACTION_PARSE_ERROR)
    await _expect_continues(session, reference, "bad input")


async def a_wrong_step_number_is_refused(checked: CheckedServer) -> None:
    """With the code STEP_CONFLICT, and the episode continues."""
    checked.require_extras("step numbers")
    reference = await checked.play(checked.seeds[0])
    session, _ = await checked.open(checked.seeds[0])
    encoded = encode_action(reference.actions[0])
    await _expect_error(session._wire.step(encoded, 7), ErrorCode.STEP_CONFLICT)
    await _expect_continues(session, reference, "a wrong step number")


async def a_repeated_step_gets_its_first_answer(checked: CheckedServer) -> None:
    """The step is not taken twice, so that a client may ask again."""
    checked.require_extras("step numbers")
    reference = await checked.play(checked.seeds[0])
    session, _ = await checked.open(checked.seeds[0])
    for number, action in enumerate(reference.actions, 1):
        encoded = encode_action(action)
        for _ in range(2):
            found = record_of(await session._wire.step(encoded, number))
            wanted = reference.record[number]
            expect(found == wanted, f"step {number} to be {wanted.decode()}", found.decode())


async def a_closed_session_is_gone(checked: CheckedServer) -> None:
    """A call to it ends with SESSION_LOST."""
    reference = await checked.play(checked.seeds[0])
    session, _ = await checked.open(checked.seeds[0])
    wire = session._wire
    await session.close()
    encoded = encode_action(reference.actions[0])
    await _expect_error(wire.step(encoded, 1), ErrorCode.SESSION_LOST)


async def observations_fit_their_schema(checked: CheckedServer) -> None:
    """All that an episode shows is as the description says."""
    schema = checked.description.observation_schema
    for result in (await checked.play(checked.seeds[0])).results:
        fault = fault_of(result.observation, schema)
        expect(not fault, "observations that fit their schema", fault)


async def the_state_fits_its_schema(checked: CheckedServer) -> None:
    """Before and after a step."""
    player = await checked.player(checked.seeds[0])
    for _ in range(2):
        state = await player.session.state()
        fault = fault_of(state, checked.description.state_schema)
        expect(not fault, "a state that fits its schema", fault)
        await player.advance()


async def actions_of_the_schema_are_taken_or_refused_with_a_code(checked: CheckedServer) -> None:
    """Whatever fits the schema gets a result or a refusal, never a failure."""
    for seed in checked.seeds:
        player = await checked.play(seed, policy_seed=seed + 1)
        codes = {str(error.code) for error in player.refusals}
        failed = codes & {str(ErrorCode.EXECUTION_ERROR)}
        expect(not failed, "results or refusals", f"a failure: {player.refusals}")


async def every_legal_answer_is_taken(checked: CheckedServer) -> None:
    """Each text that an observation offers is an action there."""
    first = (await checked.play(checked.seeds[0])).results[0]
    if first.text is None or not first.text.legal_answers:
        raise NotOfferedError("no legal answers as text")
    for answer in first.text.legal_answers[:_NUM_TOGETHER]:
        session, _ = await checked.open(checked.seeds[0])
        await session.step(text=answer)
        await checked.close()


async def flags_and_rewards_are_sound(checked: CheckedServer) -> None:
    """No reward after a reset, and a running episode."""
    player = await checked.play(checked.seeds[0])
    first = player.results[0]
    expect(not first.done, "a running episode after a reset", "one that is over")
    if not checked.is_upstream:
        expect(first.reward is None, "no reward after a reset", first.reward)
    early = [result for result in player.results[:-1] if result.done]
    expect(not early, "no result after the end of an episode", early)


WIRE_RULES: dict[str, WireRule] = {
    rule.__name__: rule
    for rule in (
        a_full_server_refuses_with_a_code,  # first: it measures the capacity
        the_server_describes_its_schemas,
        flags_and_rewards_are_sound,
        same_seed_and_actions_give_the_same_episode,
        seeds_are_not_ignored,
        sessions_side_by_side_do_not_disturb_each_other,
        a_second_reset_starts_again,
        a_group_begins_alike,
        a_step_before_the_reset_is_refused,
        a_step_after_the_end_is_refused,
        malformed_actions_are_refused_and_change_nothing,
        a_wrong_step_number_is_refused,
        a_repeated_step_gets_its_first_answer,
        a_closed_session_is_gone,
        observations_fit_their_schema,
        the_state_fits_its_schema,
        actions_of_the_schema_are_taken_or_refused_with_a_code,
        every_legal_answer_is_taken,
    )
}


def _at_least_two(checked: CheckedServer) -> int:
    if checked.capacity < 2:
        raise NotOfferedError("the server holds one session at a time")
    return min(_NUM_TOGETHER, checked.capacity)


async def _open_soon(checked: CheckedServer) -> AsyncSession:
    """A session; a server may take a moment to notice that others were closed."""
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
    expect(False, expected, f"a result: {record_of(result).decode()}")


async def _expect_continues(
    session: AsyncSession, reference: WirePlayer, circumstance: str
) -> None:
    """The episode continues as the reference went from its beginning."""
    for number, action in enumerate(reference.actions[:2], 1):
        found, wanted = record_of(await _step(session, action)), reference.record[number]
        said = f"an untouched episode after {circumstance}, step {number} {wanted.decode()}"
        expect(found == wanted, said, found.decode())
