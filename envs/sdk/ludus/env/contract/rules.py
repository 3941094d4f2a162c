"""The rules of the environment contract as functions that raise BrokenRuleError.

Servers check at their start whether the rules of determinism hold (`is_deterministic`).
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import orjson

from ludus.env.contract.players import (
    CheckedEnvironment,
    CheckedEpisode,
    draw_legal_action,
    encode_record,
)
from ludus.env.contract.schema import draw_value, find_schema_fault
from ludus.env.encoding import encode_transition
from ludus.env.environment import AnyEnvironment, takes_any_text
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.types import (
    MESSAGE_ROLES,
    Action,
    Observation,
    Tool,
    ToolResult,
    Transition,
    has_message_role,
)
from ludus.proto.errors import (
    ActionError,
    ActionParseError,
    ExecutionError,
    InvalidCallError,
    LudusError,
    ToolError,
)
from ludus.proto.rewards import REWARD_RULE, is_valid_reward

_log = logging.getLogger(__name__)

Rule = Callable[[CheckedEnvironment], None]

_GARBAGE_TEXTS = ("", "\x00 no player would ever answer this \x00")
_ODD_TEXTS = (
    *("\n", "\x1e", "\u200b", "-", "+", "--5", "+-5", "1_0", "1.5", "1e9", "5\x1e", "²", "٣", "½"),
    *("null", "true", "NaN", "[]", "{}", '{"', "[[1]]", "<answer>", "</think>", "<think>"),
    *("9" * 5000, "[" * 5000, "1" * 400 + ".0"),
)
"""Texts that language models produce early in training, and inputs that break int() and
json.loads()."""
_UNKNOWN_TOOL = "no tool is ever called this"
_NUM_CHANGED_ANSWERS = 4
_MAX_SHOWN_CHARS = 40
_QUICK_SEEDS = (1, 2)
_QUICK_NUM_STEPS = 8
_RETURN_TOLERANCE = 1e-6
"""Relative tolerance for rounding errors in the sum of an episode's rewards."""


class BrokenRuleError(LudusError):
    """A broken rule of the contract."""


def reset_has_no_reward(subject: CheckedEnvironment) -> None:
    """Check that a reset returns no reward and starts an episode that is not over."""
    for seed in subject.seeds:
        call = f"reset(seed={seed})"
        transition = subject.make().reset(seed=seed)
        expect(transition.reward is None, f"reward None after {call}", transition.reward)
        is_over = transition.terminated or transition.truncated
        expect(not is_over, f"a running episode after {call}", "an episode that is over")


def flags_and_rewards_have_their_types(subject: CheckedEnvironment) -> None:
    """Check that flags are bool and rewards float, because some wires reject NumPy's types."""
    for transition in subject.play(subject.seeds[0]).transitions:
        _require_types(transition)


def success_is_reported_at_the_end(subject: CheckedEnvironment) -> None:
    """Check that success is a bool or None, and None before the end of an episode."""
    for seed in subject.seeds:
        for transition in subject.play(seed, policy_seed=seed).transitions:
            _require_success_at_end(transition)


def _require_types(result: Transition[Any] | ToolResult, source: str = "") -> None:
    for name in ("terminated", "truncated"):
        flag = getattr(result, name)
        actual = f"{flag!r} ({type(flag).__name__})"
        expect(type(flag) is bool, f"{name} to be a bool{source}", actual)
    reward = result.reward
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    expect(reward is None or is_number, f"a reward that is a float or None{source}", repr(reward))
    is_valid = reward is None or is_valid_reward(reward)
    expect(is_valid, f"a reward that is {REWARD_RULE}, or None{source}", repr(reward))


def _require_success_at_end(result: Transition[Any] | ToolResult, source: str = "") -> None:
    success, is_over = result.success, result.terminated or result.truncated
    is_flag = success is None or type(success) is bool
    actual = f"{success!r} ({type(success).__name__})"
    expect(is_flag, f"success to be a bool or None{source}", actual)
    expected = f"success None before the end of an episode{source}"
    expect(success is None or is_over, expected, success)


def returns_are_in_the_declared_range(subject: CheckedEnvironment) -> None:
    """Check that no episode has a return outside `return_range`."""
    declared_range = subject.make().return_range
    if declared_range is None:
        return
    lowest, highest = declared_range.lowest, declared_range.highest
    tolerance = _RETURN_TOLERANCE * max(1.0, abs(lowest), abs(highest))
    for seed in subject.seeds:
        episode = subject.play(seed, policy_seed=seed)
        if not episode.is_over:
            continue
        episode_return = math.fsum(transition.reward or 0.0 for transition in episode.transitions)
        is_inside = lowest - tolerance <= episode_return <= highest + tolerance
        expect(is_inside, f"a return from {lowest:g} to {highest:g}", episode_return)


def same_seed_and_actions_give_the_same_episode(subject: CheckedEnvironment) -> None:
    """Check that episodes repeat even if the global random state of the process changes."""
    for seed in subject.seeds:
        episode = subject.play(seed, policy_seed=seed)
        random.seed(seed + 1)
        expect_same(episode.record, subject.play(seed, episode.actions).record, f"seed {seed}")


def parallel_episodes_are_independent(subject: CheckedEnvironment) -> None:
    """Check that two interleaved episodes are equal to the same episodes played separately."""
    references = [subject.play(seed, policy_seed=seed) for seed in subject.seeds[:2]]
    # The rules of the wire check this case with several processes.
    if subject.allows_one_instance:
        return
    parallel_episodes = [
        CheckedEpisode(subject, seed, reference.actions)
        for seed, reference in zip(subject.seeds, references, strict=False)
    ]
    while any([episode.advance() for episode in parallel_episodes]):
        pass
    for reference, episode in zip(references, parallel_episodes, strict=True):
        expect_same(reference.record, episode.record, "an episode parallel to another episode")


def a_second_reset_starts_again(subject: CheckedEnvironment) -> None:
    """Check that a reset removes every trace of the previous episode."""
    episode = subject.play(subject.seeds[0])
    second_record = encode_record(episode.environment.reset(seed=subject.seeds[0]))
    expect(second_record == episode.record[0], episode.record[0].decode(), second_record.decode())


def seeds_are_not_ignored(subject: CheckedEnvironment) -> None:
    """Check that seeds determine the randomness of an environment, if it has any."""

    def collect_records(seeds: Sequence[int | None], policy_seed: int = 0) -> set[bytes]:
        return {b"".join(subject.play(seed, policy_seed=policy_seed).record) for seed in seeds}

    records = collect_records(subject.seeds)
    if len(records) > 1 or len(subject.seeds) < 2:
        return
    # In a small environment, a policy may get equal episodes for all seeds by chance: try others.
    for policy_seed, seed_pair in enumerate(pairwise(subject.seeds), start=1):
        if len(collect_records(seed_pair, policy_seed)) > 1:
            return
    unseeded_records = collect_records([None] * len(subject.seeds))
    actual = f"equal episodes for seeds {list(subject.seeds)} and different ones without a seed"
    expect(unseeded_records == records, "episodes that depend on the seed", actual)


def a_step_after_the_end_is_refused(subject: CheckedEnvironment) -> None:
    """Check that a step after the end raises an exception of any type."""
    for seed in subject.seeds:
        episode = subject.play(seed)
        if not episode.is_over or not episode.actions:
            continue
        try:
            transition = episode.environment.step(episode.actions[-1])
        except Exception:  # noqa: BLE001 - any exception is a valid refusal
            continue
        expect(False, "an error for a step after the end", encode_record(transition).decode())


def observations_fit_their_schema(subject: CheckedEnvironment) -> None:
    """Check that observations have the declared type and are unchanged after JSON encoding."""
    episode = subject.play(subject.seeds[0])
    declared_type = episode.environment.observation_type
    for transition in episode.transitions:
        observation = transition.observation
        is_declared = type(observation) is declared_type
        expected = f"observations of type {declared_type.__name__}"
        expect(is_declared, expected, type(observation).__name__)
        decoded = declared_type.model_validate_json(observation.model_dump_json())
        expect(decoded == observation, f"{observation!r} after JSON encoding", repr(decoded))
        orjson.dumps(transition.info, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def the_state_fits_its_schema(subject: CheckedEnvironment) -> None:
    """Check that the state has the declared type and can be encoded as JSON."""
    environment = subject.play(subject.seeds[0]).environment
    declared_type, state = environment.state_type, environment.state
    is_declared = isinstance(state, declared_type)
    expect(is_declared, f"a state of type {declared_type.__name__}", type(state).__name__)
    declared_type.model_validate_json(state.model_dump_json())


def every_legal_answer_is_a_legal_action(subject: CheckedEnvironment) -> None:
    """Check that the text renderer parses its legal answers to actions that are legal."""
    renderer = subject.make().text_renderer
    if renderer is None:
        return
    for seed in subject.seeds:
        observation = subject.make().reset(seed=seed).observation
        for answer in renderer.legal_answers(observation):
            environment = subject.make()
            environment.reset(seed=seed)
            environment.step(renderer.parse(answer, observation))


def garbage_is_refused(subject: CheckedEnvironment) -> None:
    """Check that the text renderer raises ActionParseError, unless every text is an action."""
    environment = subject.make()
    renderer = environment.text_renderer
    if renderer is None or takes_any_text(renderer):
        return
    observation = environment.reset(seed=subject.seeds[0]).observation
    for text in _GARBAGE_TEXTS:
        try:
            action = renderer.parse(text, observation)
        except ActionParseError:
            continue
        expect(False, f"ActionParseError for {text!r}", repr(action))


def odd_texts_are_parsed_or_refused(subject: CheckedEnvironment) -> None:
    """Check that parsing raises only ActionErrors, because other errors would stop a run."""
    environment = subject.make()
    renderer = environment.text_renderer
    if renderer is None:
        return
    observation = environment.reset(seed=subject.seeds[0]).observation
    answers = renderer.legal_answers(observation)[:_NUM_CHANGED_ANSWERS]
    variants = (variant for answer in answers for variant in _make_variants(answer))
    for text in (*_ODD_TEXTS, *variants):
        try:
            renderer.parse(text, observation)
        except ActionError:
            continue
        except Exception as error:  # noqa: BLE001 - an error of third-party code is the result
            excerpt = f"{text[:_MAX_SHOWN_CHARS]!r}" + ("..." if text[_MAX_SHOWN_CHARS:] else "")
            expect(False, f"an action or ActionParseError for {excerpt}", repr(error))


def _make_variants(answer: str) -> tuple[str, ...]:
    """Return texts that are similar to the answer."""
    return (
        *(f"{answer}\x1e", f"{answer}²", f"{answer}.", f"-{answer}", f"--{answer}"),
        *(f"{answer} {answer}", answer + answer, answer[:-1], f"<answer>{answer}"),
    )


def results_can_be_encoded(subject: CheckedEnvironment) -> None:
    """Check that all wires can encode observations, rewards, tensors, info and texts."""
    environment = subject.make()
    first_transition = environment.reset(seed=subject.seeds[0])
    # Encode the first result before its observation is used to choose an action.
    _require_encodable(first_transition, environment, 0)
    episode = subject.play(subject.seeds[0])
    for index, transition in enumerate(episode.transitions):
        _require_encodable(transition, episode.environment, index)


def _require_encodable(
    transition: Transition[Any], environment: AnyEnvironment, index: int
) -> None:
    try:
        encode_transition(transition, environment.text_renderer, index)
    except ExecutionError as error:
        raise BrokenRuleError(error.message) from error


def text_is_chat_messages(subject: CheckedEnvironment) -> None:
    """Check that rendering returns chat messages, and at least one message after a reset."""
    episode = subject.play(subject.seeds[0])
    renderer = episode.environment.text_renderer
    if renderer is None:
        return
    for index, transition in enumerate(episode.transitions):
        messages = renderer.render(transition.observation, first=index == 0)
        expect(isinstance(messages, list), "a list of messages", repr(messages))
        for message in messages:
            is_chat = isinstance(message, dict) and set(message) == {"role", "content"}
            is_chat = is_chat and all(isinstance(value, str) for value in message.values())
            expect(is_chat, "a role and a text", message)
            expected = f"one of the roles {', '.join(MESSAGE_ROLES)}"
            expect(has_message_role(message), expected, message)
        has_user = any(message["role"] == "user" for message in messages)
        expect(has_user or index > 0, "a message with role 'user' after a reset", messages)


def action_metadata_changes_nothing(subject: CheckedEnvironment) -> None:
    """Check that the metadata of actions, which clients may set freely, has no effect."""
    episode = subject.play(subject.seeds[0])
    actions_with_metadata = [
        action.model_copy(update={"metadata": {"note": "harmless"}}) for action in episode.actions
    ]
    second_episode = subject.play(subject.seeds[0], actions_with_metadata)
    expect_same(episode.record, second_episode.record, "actions with metadata")


def tools_are_described(subject: CheckedEnvironment) -> None:
    """Check that each tool has a unique name, a description and a schema of an object."""
    tools = subject.make().tools
    for tool in tools:
        expect(isinstance(tool, Tool), "tools of type ludus.env.Tool", repr(tool))
        expect(isinstance(tool.name, str) and bool(tool.name), "a name of each tool", repr(tool))
        expected = f"a text as description of the tool '{tool.name}'"
        expect(isinstance(tool.description, str), expected, repr(tool.description))
        fault = find_schema_fault(tool.input_schema)
        is_object = not fault and tool.input_schema.get("type", "object") == "object"
        expected = f"a JSON schema of an object as input_schema of the tool '{tool.name}'"
        expect(is_object, expected, fault or tool.input_schema)
    names = [tool.name for tool in tools]
    expect(len(set(names)) == len(names), "tools of different names", names)


def an_unknown_tool_is_refused(subject: CheckedEnvironment) -> None:
    """Check that a call of an unknown tool raises ToolError."""
    environment = subject.make()
    if not environment.tools:
        return
    environment.reset(seed=subject.seeds[0])
    try:
        tool_result = environment.call_tool(_UNKNOWN_TOOL, {})
    except ToolError:
        return
    expect(False, f"ToolError for a call of {_UNKNOWN_TOOL!r}", tool_result)


def tools_return_json_objects(subject: CheckedEnvironment) -> None:
    """Check that tools return JSON objects, or raise ToolError or InvalidCallError.

    Arguments that fit the schema may still be invalid. Each tool is called in a new episode, which
    it may end.
    """
    environment = subject.make()
    if not environment.tools:
        return
    generator = random.Random(f"tools {subject.seeds[0]}")
    for tool in environment.tools:
        environment.reset(seed=subject.seeds[0])
        arguments = draw_value({"type": "object", **tool.input_schema}, generator)
        try:
            tool_result = environment.call_tool(tool.name, arguments)
        except (ToolError, InvalidCallError):
            continue
        source = f"from the tool '{tool.name}' with {arguments}"
        if isinstance(tool_result, ToolResult):
            _require_types(tool_result, f" {source}")
            _require_success_at_end(tool_result, f" {source}")
            tool_result = tool_result.content
        expect(isinstance(tool_result, dict), f"a JSON object {source}", repr(tool_result))
        orjson.dumps(tool_result)


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        reset_has_no_reward,
        flags_and_rewards_have_their_types,
        success_is_reported_at_the_end,
        returns_are_in_the_declared_range,
        same_seed_and_actions_give_the_same_episode,
        parallel_episodes_are_independent,
        a_second_reset_starts_again,
        seeds_are_not_ignored,
        a_step_after_the_end_is_refused,
        observations_fit_their_schema,
        the_state_fits_its_schema,
        every_legal_answer_is_a_legal_action,
        garbage_is_refused,
        odd_texts_are_parsed_or_refused,
        results_can_be_encoded,
        text_is_chat_messages,
        action_metadata_changes_nothing,
        tools_are_described,
        an_unknown_tool_is_refused,
        tools_return_json_objects,
    )
}


def expect(condition: bool, expected: str, actual: object) -> None:
    """Raise BrokenRuleError unless the condition is true."""
    if not condition:
        raise BrokenRuleError(f"expected {expected}, got {actual}")


def expect_same(expected: list[bytes], actual: list[bytes], circumstance: str) -> None:
    """Raise BrokenRuleError unless two records contain equal transitions."""
    for index, (expected_result, actual_result) in enumerate(zip(expected, actual, strict=False)):
        expected_text = (
            f"the same episode for {circumstance}; step {index} was {expected_result.decode()}"
        )
        expect(expected_result == actual_result, expected_text, actual_result.decode())
    expected_text = f"the same episode for {circumstance}; it took {len(expected) - 1} steps"
    expect(len(expected) == len(actual), expected_text, len(actual) - 1)


class _OutOfTimeError(LudusError):
    """The environment is too slow for a check during the start of a server."""


def is_deterministic(factory: EnvironmentFactory, budget_s: float = 2.0) -> bool:
    """Return True if equal seeds and actions give equal episodes, also in parallel.

    False means not verified: the environment lists no legal actions, raises an error, or takes
    longer than the budget, which is checked between steps.
    """
    deadline_s = time.monotonic() + budget_s
    num_steps = 0

    def check_time() -> None:
        if time.monotonic() > deadline_s:
            raise _OutOfTimeError("the determinism check reached its time limit")

    def choose_action(
        environment: AnyEnvironment, observation: Observation, generator: random.Random
    ) -> Action:
        nonlocal num_steps
        check_time()
        num_steps += 1
        return draw_legal_action(environment, observation, generator)

    def make_environment() -> AnyEnvironment:
        check_time()
        return factory()

    subject = CheckedEnvironment(make_environment, _QUICK_SEEDS, _QUICK_NUM_STEPS, choose_action)
    random_state = random.getstate()
    try:
        same_seed_and_actions_give_the_same_episode(subject)
        parallel_episodes_are_independent(subject)
    except BrokenRuleError as error:
        _log.warning("environment treated as not deterministic: %s", error)
        return False
    except _OutOfTimeError as error:
        _log.warning(
            "environment treated as not deterministic: %s after %d steps; if it is deterministic,"
            " serve it with --deterministic",
            error,
            num_steps,
        )
        return False
    except Exception as error:  # noqa: BLE001 - an error of third-party code is the result
        _log.info("could not check whether the environment is deterministic: %s", error)
        return False
    finally:
        random.setstate(random_state)
        subject.close()
    return True
