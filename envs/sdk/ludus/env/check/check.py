"""Checks that any environment and any server can run, to see that they keep their contract.

report = check_environment(MyEnvironment)
report.raise_if_failed()

    class, target --check_environment--> rules of the environment (check_rules), in process
    server        --check_server-------> rules of the wire (check_wire), over a client
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ludus.env.check.wire_players import CheckedServer, NotOfferedError
from ludus.env.check.wire_rules import WIRE_RULES
from ludus.env.client.client import AsyncEnvClient
from ludus.env.contract.players import ActionSource, CheckedEnvironment, random_legal_action
from ludus.env.contract.rules import RULES, BrokenRuleError, Rule
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.targets.targets import TargetFactory
from ludus.proto.errors import InfrastructureError, LudusError

Verdict = Literal["ok", "broken", "not offered"]
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

    @property
    def verdict(self) -> Verdict:
        """In a word."""
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
    on_check: OnCheck | None = None,
) -> CheckReport:
    """Every rule of the environment contract, and whether the factory's product keeps it.

    Args:
        seeds: one episode is played for each.
        num_steps: at most so many steps of an episode are played.
        choose_action: a legal action for an observation; the default draws one from the
            text renderer's legal answers, the observation's `legal_actions`, or the schema.
        on_check: called with each rule's outcome as it comes.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    if isinstance(factory, TargetFactory):
        name = factory.target
    checks = []
    for rule_name, rule in RULES.items():
        checked = CheckedEnvironment(factory, seeds, num_steps, choose_action)
        checks.append(_run(rule_name, rule, checked))
        if on_check is not None:
            on_check(checks[-1])
    return CheckReport(name, checks)


async def check_server(
    client: AsyncEnvClient,
    *,
    seeds: Sequence[int] = tuple(range(4)),
    num_steps: int = 50,
    timeout_s: float = 60.0,
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
    checks = []
    for name, rule in WIRE_RULES.items():
        checks.append(await _run_on_wire(name, rule(checked), checked, timeout_s))
        if on_check is not None:
            on_check(checks[-1])
    return CheckReport(checked.description.name, checks)


def _run(name: str, rule: Rule, checked: CheckedEnvironment) -> Check:
    try:
        rule(checked)
    except BrokenRuleError as error:
        return Check(name, ok=False, detail=str(error))
    except Exception as error:  # noqa: BLE001 - foreign code: what it raises is the finding
        return Check(name, ok=False, detail=f"expected no error, got {error!r}")
    finally:
        checked.close()
    return Check(name, ok=True)


async def _run_on_wire(
    name: str, asking: Awaitable[None], checked: CheckedServer, timeout_s: float
) -> Check:
    try:
        async with asyncio.timeout(timeout_s):
            try:
                await asking
            finally:
                await checked.close()
    except BrokenRuleError as error:
        return Check(name, ok=False, detail=str(error))
    except NotOfferedError as error:
        return Check(name, ok=True, detail=str(error), is_offered=False)
    except TimeoutError:
        return Check(name, ok=False, detail=f"expected an end within {timeout_s:g} s, got none")
    except InfrastructureError as error:
        return Check(name, ok=False, detail=f"expected answers, got {error.code}: {error}")
    except LudusError as error:
        return Check(name, ok=False, detail=f"expected no error, got {error!r}")
    return Check(name, ok=True)
