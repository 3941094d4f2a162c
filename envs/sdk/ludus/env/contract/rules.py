"""The rules of the environment contract, each a function that raises when it is broken."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import orjson

from ludus.env.contract.players import CheckedEnvironment, Player, record_of
from ludus.env.contract.schema import fault_of_schema, random_value
from ludus.env.encoding import encode_transition
from ludus.env.environment import AnyEnvironment, takes_any_text
from ludus.env.types import Tool, Transition
from ludus.proto.errors import (
    ActionError,
    ActionParseError,
    ExecutionError,
    InvalidCallError,
    LudusError,
    ToolError,
)

Rule = Callable[[CheckedEnvironment], None]

_GARBAGE = ("", "\x00 no player would ever answer this \x00")
_ODD_TEXTS = (
    *("\n", "\x1e", "\u200b", "-", "+", "--5", "+-5", "1_0", "1.5", "1e9", "5\x1e", "²", "٣", "½"),
    *("null", "true", "NaN", "[]", "{}", '{"', "[[1]]", "<answer>", "</think>", "<think>"),
    *("9" * 5000, "[" * 5000, "1" * 400 + ".0"),
)
"""What language models say while they learn to answer, and what trips int() and json.loads()."""
_NO_TOOL = "no tool is ever called this"
_NUM_VARIED_ANSWERS = 4
_MAX_SHOWN_CHARS = 40


class BrokenRuleError(LudusError):
    """A rule of the contract that did not hold."""


def reset_has_no_reward(checked: CheckedEnvironment) -> None:
    """A reset scores nothing and starts a running episode."""
    for seed in checked.seeds:
        first = checked.make().reset(seed=seed)
        expect(first.reward is None, f"reward None after reset(seed={seed})", first.reward)
        over = first.terminated or first.truncated
        expect(not over, f"a running episode after reset(seed={seed})", "one that is over")


def flags_and_rewards_have_their_types(checked: CheckedEnvironment) -> None:
    """Flags are bool and rewards float; NumPy's own types do not survive every wire."""
    for transition in checked.play(checked.seeds[0]).transitions:
        for name in ("terminated", "truncated"):
            flag = getattr(transition, name)
            expect(type(flag) is bool, f"{name} to be a bool", f"{flag!r} ({type(flag).__name__})")
        reward = transition.reward
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
        expect(reward is None or is_number, "a reward that is a float or None", repr(reward))
        is_finite = reward is None or math.isfinite(reward)
        expect(is_finite, "a reward that is a finite number or None", repr(reward))


def success_is_said_at_the_end(checked: CheckedEnvironment) -> None:
    """As a bool, or None where the environment does not say; before the end it is None."""
    for seed in checked.seeds:
        for transition in checked.play(seed, policy_seed=seed).transitions:
            said = transition.success
            is_flag = said is None or type(said) is bool
            expect(is_flag, "success to be a bool or None", f"{said!r} ({type(said).__name__})")
            over = transition.terminated or transition.truncated
            expect(said is None or over, "success None before the end of an episode", said)


def same_seed_and_actions_give_the_same_episode(checked: CheckedEnvironment) -> None:
    """Also whatever the process does to its global random state."""
    for seed in checked.seeds:
        first = checked.play(seed, policy_seed=seed)
        random.seed(seed + 1)
        expect_same(first.record, checked.play(seed, first.actions).record, f"seed {seed}")


def another_session_changes_nothing(checked: CheckedEnvironment) -> None:
    """Two sessions take turns, and each goes as it went alone."""
    alone = [checked.play(seed, policy_seed=seed) for seed in checked.seeds[:2]]
    if checked.holds_one:  # then the rules of the wire try it, over processes
        return
    together = [
        Player(checked, seed, player.actions)
        for seed, player in zip(checked.seeds, alone, strict=False)
    ]
    while any([player.advance() for player in together]):
        pass
    for before, after in zip(alone, together, strict=True):
        expect_same(before.record, after.record, "an episode beside another one")


def a_second_reset_starts_again(checked: CheckedEnvironment) -> None:
    """What was played before leaves no trace."""
    player = checked.play(checked.seeds[0])
    again = record_of(player.environment.reset(seed=checked.seeds[0]))
    expect(again == player.record[0], player.record[0].decode(), again.decode())


def seeds_are_not_ignored(checked: CheckedEnvironment) -> None:
    """Where chance plays a part, seeds decide it; where none does, no seed changes a thing."""
    seeded = {b"".join(checked.play(seed).record) for seed in checked.seeds}
    if len(seeded) > 1 or len(checked.seeds) < 2:
        return
    # One player may see the same on all seeds of a small environment; others see them differ.
    for policy_seed, pair in enumerate(pairwise(checked.seeds), start=1):
        if len({b"".join(checked.play(seed, policy_seed=policy_seed).record) for seed in pair}) > 1:
            return
    unseeded = {b"".join(checked.play(None).record) for _ in checked.seeds}
    found = f"one and the same for all of {list(checked.seeds)}, but others without a seed"
    expect(unseeded == seeded, "episodes that differ with the seed", found)


def a_step_after_the_end_is_refused(checked: CheckedEnvironment) -> None:
    """By an exception, whatever its type."""
    for seed in checked.seeds:
        player = checked.play(seed)
        if not player.is_over or not player.actions:
            continue
        try:
            after = player.environment.step(player.actions[-1])
        except Exception:  # noqa: BLE001 - any refusal will do
            continue
        expect(False, "an error for a step after the end", record_of(after).decode())


def observations_fit_their_schema(checked: CheckedEnvironment) -> None:
    """They have the declared type, validate against it, and survive JSON."""
    player = checked.play(checked.seeds[0])
    declared = player.environment.observation_type
    for transition in player.transitions:
        found = transition.observation
        expect(
            type(found) is declared,
            f"observations of type {declared.__name__}",
            type(found).__name__,
        )
        returned = declared.model_validate_json(found.model_dump_json())
        expect(returned == found, f"{found!r} to survive JSON", repr(returned))
        orjson.dumps(transition.info, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def the_state_fits_its_schema(checked: CheckedEnvironment) -> None:
    """It has the declared type and survives JSON."""
    environment = checked.play(checked.seeds[0]).environment
    declared, state = environment.state_type, environment.state
    expect(
        isinstance(state, declared), f"a state of type {declared.__name__}", type(state).__name__
    )
    declared.model_validate_json(state.model_dump_json())


def every_legal_answer_is_a_legal_action(checked: CheckedEnvironment) -> None:
    """The text renderer reads back each answer it offers, and the environment takes it."""
    renderer = checked.make().text_renderer
    if renderer is None:
        return
    for seed in checked.seeds:
        observation = checked.make().reset(seed=seed).observation
        for answer in renderer.legal_answers(observation):
            environment = checked.make()
            environment.reset(seed=seed)
            environment.step(renderer.parse(answer, observation))


def garbage_is_no_action(checked: CheckedEnvironment) -> None:
    """The text renderer refuses it with ActionParseError, unless it takes any text."""
    environment = checked.make()
    renderer = environment.text_renderer
    if renderer is None or takes_any_text(renderer):
        return
    observation = environment.reset(seed=checked.seeds[0]).observation
    for text in _GARBAGE:
        try:
            action = renderer.parse(text, observation)
        except ActionParseError:
            continue
        expect(False, f"ActionParseError for {text!r}", repr(action))


def odd_texts_are_read_or_refused(checked: CheckedEnvironment) -> None:
    """Parsing gives an action or an ActionError, and no other error, which would end a run."""
    environment = checked.make()
    renderer = environment.text_renderer
    if renderer is None:
        return
    observation = environment.reset(seed=checked.seeds[0]).observation
    answers = renderer.legal_answers(observation)[:_NUM_VARIED_ANSWERS]
    for text in (*_ODD_TEXTS, *(varied for answer in answers for varied in _varied(answer))):
        try:
            renderer.parse(text, observation)
        except ActionError:
            continue
        except Exception as error:  # noqa: BLE001 - foreign code: what it raises is the finding
            shown = f"{text[:_MAX_SHOWN_CHARS]!r}" + ("..." if text[_MAX_SHOWN_CHARS:] else "")
            expect(False, f"an action or ActionParseError for {shown}", repr(error))


def _varied(answer: str) -> tuple[str, ...]:
    """Texts that are nearly the answer."""
    return (
        *(f"{answer}\x1e", f"{answer}²", f"{answer}.", f"-{answer}", f"--{answer}"),
        *(f"{answer} {answer}", answer + answer, answer[:-1], f"<answer>{answer}"),
    )


def what_is_shown_can_travel(checked: CheckedEnvironment) -> None:
    """Observations, rewards, tensors, info and texts are what every wire can carry."""
    environment = checked.make()
    first = environment.reset(seed=checked.seeds[0])
    _encode(first, environment, 0)  # before answers are chosen from it
    player = checked.play(checked.seeds[0])
    for index, transition in enumerate(player.transitions):
        _encode(transition, player.environment, index)


def _encode(transition: Transition[Any], environment: AnyEnvironment, index: int) -> None:
    try:
        encode_transition(transition, environment.text_renderer, index)
    except ExecutionError as error:
        raise BrokenRuleError(error.message) from error


def text_is_chat_messages(checked: CheckedEnvironment) -> None:
    """Rendering gives at least one message after a reset, each a role and a text."""
    player = checked.play(checked.seeds[0])
    renderer = player.environment.text_renderer
    if renderer is None:
        return
    for index, transition in enumerate(player.transitions):
        messages = renderer.render(transition.observation, first=index == 0)
        expect(bool(messages) or index > 0, "at least one message after a reset", messages)
        for message in messages:
            is_chat = set(message) == {"role", "content"} and isinstance(message["content"], str)
            expect(is_chat, "a role and a text", message)


def action_metadata_changes_nothing(checked: CheckedEnvironment) -> None:
    """Clients may put anything there."""
    plain = checked.play(checked.seeds[0])
    noisy = [a.model_copy(update={"metadata": {"note": "harmless"}}) for a in plain.actions]
    again = checked.play(checked.seeds[0], noisy)
    expect_same(plain.record, again.record, "actions with metadata")


def tools_are_described(checked: CheckedEnvironment) -> None:
    """Each has a name of its own, a description and a JSON schema of an object for arguments."""
    tools = checked.make().tools
    for tool in tools:
        expect(isinstance(tool, Tool), "tools of type ludus.env.Tool", repr(tool))
        expect(isinstance(tool.name, str) and bool(tool.name), "a name of each tool", repr(tool))
        said = f"a text as description of the tool '{tool.name}'"
        expect(isinstance(tool.description, str), said, repr(tool.description))
        fault = fault_of_schema(tool.input_schema)
        is_object = not fault and tool.input_schema.get("type", "object") == "object"
        said = f"a JSON schema of an object as input_schema of the tool '{tool.name}'"
        expect(is_object, said, fault or tool.input_schema)
    names = [tool.name for tool in tools]
    expect(len(set(names)) == len(names), "tools of different names", names)


def an_unknown_tool_is_refused(checked: CheckedEnvironment) -> None:
    """With ToolError, and so is what a tool cannot do; a player may ask for anything."""
    environment = checked.make()
    if not environment.tools:
        return
    environment.reset(seed=checked.seeds[0])
    try:
        returned = environment.call_tool(_NO_TOOL, {})
    except ToolError:
        return
    expect(False, f"ToolError for a call of {_NO_TOOL!r}", returned)


def tools_return_json_objects(checked: CheckedEnvironment) -> None:
    """Or refuse, with ToolError or InvalidCallError: arguments that fit need not make sense."""
    environment = checked.make()
    if not environment.tools:
        return
    environment.reset(seed=checked.seeds[0])
    generator = random.Random(f"tools {checked.seeds[0]}")
    for tool in environment.tools:
        arguments = random_value({"type": "object", **tool.input_schema}, generator)
        try:
            returned = environment.call_tool(tool.name, arguments)
        except (ToolError, InvalidCallError):
            continue
        said = f"a JSON object from the tool '{tool.name}' with {arguments}"
        expect(isinstance(returned, dict), said, repr(returned))
        orjson.dumps(returned)


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        reset_has_no_reward,
        flags_and_rewards_have_their_types,
        success_is_said_at_the_end,
        same_seed_and_actions_give_the_same_episode,
        another_session_changes_nothing,
        a_second_reset_starts_again,
        seeds_are_not_ignored,
        a_step_after_the_end_is_refused,
        observations_fit_their_schema,
        the_state_fits_its_schema,
        every_legal_answer_is_a_legal_action,
        garbage_is_no_action,
        odd_texts_are_read_or_refused,
        what_is_shown_can_travel,
        text_is_chat_messages,
        action_metadata_changes_nothing,
        tools_are_described,
        an_unknown_tool_is_refused,
        tools_return_json_objects,
    )
}


def expect(held: bool, expected: str, found: object) -> None:
    """Raise BrokenRuleError unless it held."""
    if not held:
        raise BrokenRuleError(f"expected {expected}, got {found}")


def expect_same(before: list[bytes], after: list[bytes], circumstance: str) -> None:
    """Raise BrokenRuleError unless two records show the same episode."""
    for index, (first, second) in enumerate(zip(before, after, strict=False)):
        said = f"the same episode for {circumstance}; step {index} was {first.decode()}"
        expect(first == second, said, second.decode())
    said = f"the same episode for {circumstance}; it took {len(before) - 1} steps"
    expect(len(before) == len(after), said, len(after) - 1)
