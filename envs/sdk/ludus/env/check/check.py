"""Checks of the contract, for any environment and any server.

report = check_environment(MyEnvironment)
report.raise_if_failed()

    class, target --check_environment--> rules of the environment, in a forked process
    server        --check_server-------> rules of the wire, over a client

Both checks always end: each rule has a time limit, and after several rules that reached it the
other rules are skipped.
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
"""Time limit of one rule."""
MAX_ENDLESS_RULES = 3
"""Number of rules at the time limit after which the other rules are skipped."""
_CLOSE_TIMEOUT_S = 10.0
_CREATION_RULE = "it_can_be_created_and_closed"

Verdict = Literal["ok", "broken", "not offered", "not tried"]
OnCheck = Callable[["Check"], None]


class EnvironmentCheckError(LudusError):
    """An environment that breaks its contract."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one rule."""

    name: str
    ok: bool
    detail: str = ""
    """Expected and actual behavior, or the missing feature; empty if the rule is kept."""
    is_offered: bool = True
    """False if the server does not have the feature of the rule."""
    is_tried: bool = True
    """False if the rule was skipped."""

    @property
    def verdict(self) -> Verdict:
        """The result as text."""
        if not self.is_tried:
            return "not tried"
        if not self.is_offered:
            return "not offered"
        return "ok" if self.ok else "broken"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of all rules."""

    environment: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """True if no rule was broken."""
        return all(check.ok for check in self.checks)

    def raise_if_failed(self) -> None:
        """Raise an error if a rule was broken.

        Raises:
            EnvironmentCheckError: the message names every broken rule.
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
    """Check every rule of the environment contract on the environments of a factory.

    The rules run in a forked process. A rule that takes longer than `timeout_s` is broken, and its
    process is killed.

    Args:
        choose_action: function that returns a legal action for an observation. Default: draw from
            the text renderer's legal answers, the observation's `legal_actions`, or the schema.

    Raises:
        ConfigError: the factory rejected its options.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    if isinstance(factory, TargetFactory):
        name = factory.target
    report = _Report(on_check)
    rules = [partial(_create_and_close, factory)]
    for rule in RULES.values():
        checked_environment = CheckedEnvironment(factory, seeds, num_steps, choose_action)
        rules.append(partial(_run, rule, checked_environment))
    with contextlib.closing(run_forked(rules, timeout_s)) as rule_results:
        for rule_name in (_CREATION_RULE, *RULES):
            if report.stop_reason:
                report.skip(rule_name)
                continue
            outcome = next(rule_results)
            if outcome.is_uncheckable:
                raise ConfigError(outcome.fault)
            check = Check(rule_name, ok=not outcome.fault, detail=outcome.fault)
            report.add(check, is_complete=outcome.is_complete)
            if rule_name == _CREATION_RULE and outcome.fault:
                report.stop_reason = "the environment cannot be created"
    return CheckReport(name, report.checks)


async def check_server(
    client: AsyncEnvClient,
    *,
    seeds: Sequence[int] = tuple(range(4)),
    num_steps: int = 50,
    timeout_s: float = TIMEOUT_S,
    on_check: OnCheck | None = None,
) -> CheckReport:
    """Check every rule of the wire on the client's server.

    The check briefly opens up to 16 sessions to measure the server's capacity. A rule that takes
    longer than `timeout_s` is broken.

    Raises:
        InfrastructureError: the server does not return its description.
    """
    checked_server = CheckedServer(client, await client.describe(), seeds, num_steps)
    report = _Report(on_check)
    for name, rule in WIRE_RULES.items():
        if report.stop_reason:
            report.skip(name)
        else:
            await _run_on_wire(name, rule, checked_server, timeout_s, report)
    return CheckReport(checked_server.description.name, report.checks)


class _Report:
    """The results until now, and the reason to skip the other rules."""

    def __init__(self, on_check: OnCheck | None) -> None:
        self.checks: list[Check] = []
        self.stop_reason = ""
        self._num_endless = 0
        self._on_check = on_check

    def add(self, check: Check, *, is_complete: bool = True) -> None:
        self.checks.append(check)
        self._num_endless += not is_complete
        if self._num_endless == MAX_ENDLESS_RULES:
            self.stop_reason = f"{MAX_ENDLESS_RULES} rules did not end"
        if self._on_check is not None:
            self._on_check(check)

    def skip(self, name: str) -> None:
        self.add(Check(name, ok=True, detail=self.stop_reason, is_tried=False))


def _create_and_close(factory: EnvironmentFactory) -> str:
    try:
        factory().close()
    except UserError as error:
        raise UncheckableError(str(error)) from error
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
    is_complete = True
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
        is_complete = False
        detail = f"the rule did not end within {timeout_s:g} s"
        check = Check(name, ok=False, detail=detail)
    except InfrastructureError as error:
        is_complete = not isinstance(error, CallTimeoutError)
        check = Check(name, ok=False, detail=f"expected results, got {error.code}: {error}")
    except LudusError as error:
        check = Check(name, ok=False, detail=f"expected no error, got {error!r}")
    report.add(check, is_complete=is_complete)


async def _close(checked: CheckedServer) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await checked.close()
    except TimeoutError:
        raise CallTimeoutError(
            f"the sessions were not closed within {_CLOSE_TIMEOUT_S:g} s"
        ) from None
