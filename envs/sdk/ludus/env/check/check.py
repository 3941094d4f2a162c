"""Checks of the contract that any environment and any server must keep.

report = check_environment(MyEnvironment)
report.raise_if_failed()

    class, target --check_environment--> rules for environments, in a forked process
    server        --check_server-------> rules for servers, over a client

Both checks always end, because each rule has a time limit. If several rules reach it, the
remaining rules are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ludus.env.check.forked_rules import UncheckableError, run_forked
from ludus.env.check.wire_players import CheckedServer, NotOfferedError
from ludus.env.check.wire_rules import WIRE_RULES, WireRule
from ludus.env.client import AsyncEnvClient
from ludus.env.contract.players import ActionSource, CheckedEnvironment, draw_legal_action
from ludus.env.contract.rules import RULES, BrokenRuleError, Rule
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.targets.targets import TargetFactory
from ludus.proto.errors import (
    CallTimeoutError,
    ConfigError,
    InfrastructureError,
    LudusError,
    UserError,
)

TIMEOUT_S = 60.0
"""Time limit of one rule."""
MAX_TIMEOUTS = 3
"""Number of rules that may reach the time limit before the remaining rules are skipped."""
_CLOSE_TIMEOUT_S = 10.0
_CREATION_RULE_NAME = "it_can_be_created_and_closed"

Verdict = Literal["ok", "broken", "not offered", "not tried"]
OnCheck = Callable[["Check"], None]


class EnvironmentCheckError(LudusError):
    """The environment or server breaks its contract."""


@dataclass(frozen=True, slots=True)
class Check:
    """The check of one rule, with its result."""

    name: str
    verdict: Verdict = "ok"
    """Result; "not offered" if the server does not have the feature that the rule checks."""
    detail: str = ""
    """Expected and actual behavior, the missing feature, or the reason to skip the rule."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The checks of all rules."""

    environment: str
    checks: list[Check]

    @property
    def has_passed(self) -> bool:
        """True if no rule was broken."""
        return all(check.verdict != "broken" for check in self.checks)

    def raise_if_failed(self) -> None:
        """Raise an error if a rule was broken.

        Raises:
            EnvironmentCheckError: the message names every broken rule.
        """
        broken_checks = [check for check in self.checks if check.verdict == "broken"]
        if broken_checks:
            faults = "".join(f"\n  {check.name}: {check.detail}" for check in broken_checks)
            raise EnvironmentCheckError(f"{self.environment} breaks its contract:{faults}")


def check_environment(
    factory: EnvironmentFactory,
    *,
    seeds: Sequence[int] = tuple(range(8)),
    num_steps: int = 50,
    choose_action: ActionSource = draw_legal_action,
    timeout_s: float = TIMEOUT_S,
    on_check: OnCheck | None = None,
) -> CheckReport:
    """Check that the environments of a factory keep every rule of the contract.

    The rules run in a forked process. A rule that takes longer than `timeout_s` is broken, and its
    process is killed.

    Args:
        choose_action: function that returns a legal action for an observation. Default: draw from
            the text renderer's legal answers, the observation's `legal_actions`, or the schema.

    Raises:
        ConfigError: the factory rejected its options.
    """
    environment_name = getattr(factory, "__name__", type(factory).__name__)
    if isinstance(factory, TargetFactory):
        environment_name = factory.target
    builder = _ReportBuilder(on_check)
    rules = [partial(_create_and_close, factory)]
    for rule in RULES.values():
        subject = CheckedEnvironment(factory, seeds, num_steps, choose_action)
        rules.append(partial(_run_rule, rule, subject))
    with contextlib.closing(run_forked(rules, timeout_s)) as rule_outcomes:
        for rule_name in (_CREATION_RULE_NAME, *RULES):
            if builder.stop_reason:
                builder.skip(rule_name)
                continue
            outcome = next(rule_outcomes)
            if outcome.is_uncheckable:
                raise ConfigError(outcome.fault)
            check = Check(rule_name, "broken" if outcome.fault else "ok", outcome.fault)
            builder.add(check, is_complete=outcome.is_complete)
            if rule_name == _CREATION_RULE_NAME and outcome.fault:
                builder.stop_reason = "the environment cannot be created"
    return CheckReport(environment_name, builder.checks)


async def check_server(
    client: AsyncEnvClient,
    *,
    seeds: Sequence[int] = tuple(range(4)),
    num_steps: int = 50,
    timeout_s: float = TIMEOUT_S,
    on_check: OnCheck | None = None,
) -> CheckReport:
    """Check that the client's server keeps every rule for servers.

    The check briefly opens up to 16 sessions to measure the server's capacity. A rule that takes
    longer than `timeout_s` is broken.

    Raises:
        InfrastructureError: the server does not return its description.
    """
    server = CheckedServer(client, await client.describe(), seeds, num_steps)
    server.max_open_s = min(server.max_open_s, timeout_s / 4)
    builder = _ReportBuilder(on_check)
    for name, rule in WIRE_RULES.items():
        if builder.stop_reason:
            builder.skip(name)
        else:
            await _run_rule_on_server(name, rule, server, timeout_s, builder)
    return CheckReport(server.description.name, builder.checks)


class _ReportBuilder:
    """A builder of a report, with the reason to skip the remaining rules."""

    def __init__(self, on_check: OnCheck | None) -> None:
        self.checks: list[Check] = []
        self.stop_reason = ""
        self._num_timeouts = 0
        self._on_check = on_check

    def add(self, check: Check, *, is_complete: bool = True) -> None:
        self.checks.append(check)
        self._num_timeouts += not is_complete
        if self._num_timeouts == MAX_TIMEOUTS:
            self.stop_reason = f"{MAX_TIMEOUTS} rules did not end"
        if self._on_check is not None:
            self._on_check(check)

    def skip(self, name: str) -> None:
        self.add(Check(name, "not tried", self.stop_reason))


def _create_and_close(factory: EnvironmentFactory) -> str:
    try:
        factory().close()
    except UserError as error:
        raise UncheckableError(str(error)) from error
    return ""


def _run_rule(rule: Rule, environment: CheckedEnvironment) -> str:
    try:
        rule(environment)
    except BrokenRuleError as error:
        return str(error)
    finally:
        environment.close()
    return ""


async def _run_rule_on_server(
    name: str, rule: WireRule, server: CheckedServer, timeout_s: float, builder: _ReportBuilder
) -> None:
    is_complete = True
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await rule(server)
        finally:
            await _close_sessions(server)
        check = Check(name)
    except BrokenRuleError as error:
        check = Check(name, "broken", str(error))
    except NotOfferedError as error:
        check = Check(name, "not offered", str(error))
    except TimeoutError:
        is_complete = False
        check = Check(name, "broken", f"the rule did not end within {timeout_s:g} s")
    except InfrastructureError as error:
        is_complete = not isinstance(error, CallTimeoutError)
        check = Check(name, "broken", f"expected results, got {error.code}: {error}")
    except LudusError as error:
        check = Check(name, "broken", f"expected no error, got {error!r}")
    builder.add(check, is_complete=is_complete)


async def _close_sessions(server: CheckedServer) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await server.close()
    except TimeoutError:
        raise CallTimeoutError(
            f"the sessions were not closed within {_CLOSE_TIMEOUT_S:g} s"
        ) from None
