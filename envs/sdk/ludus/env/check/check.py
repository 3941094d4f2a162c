"""Checks that any environment and any server can run, to see that they keep their contract.

report = check_environment(MyEnvironment)
report.raise_if_failed()

    class, target --check_environment--> rules of the environment, in a process of their own
    server        --check_server-------> rules of the wire, over a client

Both end, whatever the environment does: each rule has a time limit, and after some that had no
end the others are not tried.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ludus.env.check.apart import MistakeError, outcomes
from ludus.env.check.wire_players import CheckedServer, NotOfferedError
from ludus.env.check.wire_rules import WIRE_RULES, WireRule
from ludus.env.client.client import AsyncEnvClient
from ludus.env.contract.players import ActionSource, CheckedEnvironment, random_legal_action
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
"""For one rule."""
MAX_ENDLESS_RULES = 3
"""After so many the others are not tried: each would take its whole time."""
_CLOSE_TIMEOUT_S = 10.0
_MAKING = "it_can_be_made_and_closed"

Verdict = Literal["ok", "broken", "not offered", "not tried"]
OnCheck = Callable[["Check"], None]


class EnvironmentCheckError(LudusError):
    """An environment that breaks its contract."""


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and whether it held."""

    name: str
    ok: bool
    detail: str = ""
    """What was expected and what was found, or what is not offered; empty when it held."""
    is_offered: bool = True
    """False where the server has nothing that the rule could be about."""
    is_tried: bool = True
    """False where rules before it left no reason to."""

    @property
    def verdict(self) -> Verdict:
        """In a word."""
        if not self.is_tried:
            return "not tried"
        if not self.is_offered:
            return "not offered"
        return "ok" if self.ok else "broken"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All rules that were checked."""

    environment: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """True when no rule was broken."""
        return all(check.ok for check in self.checks)

    def raise_if_failed(self) -> None:
        """Raise unless every rule held.

        Raises:
            EnvironmentCheckError: names every broken rule.
        """
        broken = [f"\n  {check.name}: {check.detail}" for check in self.checks if not check.ok]
        if broken:
            raise EnvironmentCheckError(f"{self.environment} breaks its contract:{''.join(broken)}")


def check_environment(
    factory: EnvironmentFactory,
    *,
    seeds: Sequence[int] = tuple(range(8)),
    num_steps: int = 50,
    choose_action: ActionSource = random_legal_action,
    timeout_s: float = TIMEOUT_S,
    on_check: OnCheck | None = None,
) -> CheckReport:
    """Every rule of the environment contract, and whether the factory's product keeps it.

    The rules run in a forked process, which is ended where one has no end.

    Args:
        seeds: one episode is played for each.
        num_steps: at most so many steps of an episode are played.
        choose_action: a legal action for an observation; the default draws one from the
            text renderer's legal answers, the observation's `legal_actions`, or the schema.
        timeout_s: for one rule; one that takes longer is broken.
        on_check: called with each rule's outcome as it comes.

    Raises:
        ConfigError: the factory refused what it was asked for.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    if isinstance(factory, TargetFactory):
        name = factory.target
    report = _Report(on_check)
    rules = [partial(_made_and_closed, factory)]
    for rule in RULES.values():
        checked = CheckedEnvironment(factory, seeds, num_steps, choose_action)
        rules.append(partial(_run, rule, checked))
    with contextlib.closing(outcomes(rules, timeout_s)) as running:
        for rule_name in (_MAKING, *RULES):
            if report.why_no_more:
                report.leave_out(rule_name)
                continue
            outcome = next(running)
            if outcome.is_mistake:
                raise ConfigError(outcome.fault)
            check = Check(rule_name, ok=not outcome.fault, detail=outcome.fault)
            report.add(check, has_ended=outcome.has_ended)
            if rule_name == _MAKING and outcome.fault:
                report.why_no_more = "it cannot be made"
    return CheckReport(name, report.checks)


async def check_server(
    client: AsyncEnvClient,
    *,
    seeds: Sequence[int] = tuple(range(4)),
    num_steps: int = 50,
    timeout_s: float = TIMEOUT_S,
    on_check: OnCheck | None = None,
) -> CheckReport:
    """Every rule of the wire, and whether the client's server keeps it.

    For a moment it opens as many sessions as the server holds, at most 16.

    Args:
        timeout_s: for one rule; one that takes longer is broken.
        on_check: called with each rule's outcome as it comes.

    Raises:
        InfrastructureError: the server cannot be asked what it is.
    """
    checked = CheckedServer(client, await client.describe(), seeds, num_steps)
    report = _Report(on_check)
    for name, rule in WIRE_RULES.items():
        if report.why_no_more:
            report.leave_out(name)
        else:
            await _run_on_wire(name, rule, checked, timeout_s, report)
    return CheckReport(checked.description.name, report.checks)


class _Report:
    """The outcomes so far, and whether it makes sense to go on."""

    def __init__(self, on_check: OnCheck | None) -> None:
        self.checks: list[Check] = []
        self.why_no_more = ""
        self._num_endless = 0
        self._on_check = on_check

    def add(self, check: Check, *, has_ended: bool = True) -> None:
        """Note how a rule went."""
        self.checks.append(check)
        self._num_endless += not has_ended
        if self._num_endless == MAX_ENDLESS_RULES:
            self.why_no_more = f"{MAX_ENDLESS_RULES} rules did not end"
        if self._on_check is not None:
            self._on_check(check)

    def leave_out(self, name: str) -> None:
        """Note that a rule was not tried."""
        self.add(Check(name, ok=True, detail=self.why_no_more, is_tried=False))


def _made_and_closed(factory: EnvironmentFactory) -> str:
    try:
        factory().close()
    except UserError as error:
        raise MistakeError(str(error)) from error
    return ""


def _run(rule: Rule, checked: CheckedEnvironment) -> str:
    try:
        rule(checked)
    except BrokenRuleError as error:
        return str(error)
    finally:
        checked.close()
    return ""


async def _run_on_wire(
    name: str, rule: WireRule, checked: CheckedServer, timeout_s: float, report: _Report
) -> None:
    has_ended = True
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await rule(checked)
        finally:
            await _close(checked)
        check = Check(name, ok=True)
    except BrokenRuleError as error:
        check = Check(name, ok=False, detail=str(error))
    except NotOfferedError as error:
        check = Check(name, ok=True, detail=str(error), is_offered=False)
    except TimeoutError:
        has_ended = False
        detail = f"expected an end within {timeout_s:g} s, got none"
        check = Check(name, ok=False, detail=detail)
    except InfrastructureError as error:
        has_ended = not isinstance(error, CallTimeoutError)
        check = Check(name, ok=False, detail=f"expected answers, got {error.code}: {error}")
    except LudusError as error:
        check = Check(name, ok=False, detail=f"expected no error, got {error!r}")
    report.add(check, has_ended=has_ended)


async def _close(checked: CheckedServer) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await checked.close()
    except TimeoutError:
        raise CallTimeoutError(
            f"expected the sessions to be closed within {_CLOSE_TIMEOUT_S:g} s, they were not"
        ) from None
