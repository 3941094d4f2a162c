"""Checks that any environment can run, to see that it keeps its contract.

report = check_environment(MyEnvironment)
report.raise_if_failed()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.env.check_play import ActionSource, CheckedEnvironment, random_legal_action
from ludus.env.check_rules import RULES, BrokenRuleError, Rule
from ludus.env.hosts import EnvironmentFactory
from ludus.proto.errors import LudusError


class EnvironmentCheckError(LudusError):
    """An environment that breaks its contract."""


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and whether it held."""

    name: str
    ok: bool
    detail: str = ""
    """What was expected and what was found; empty when it held."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All rules that were checked."""

    environment: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """True when every rule held."""
        return all(check.ok for check in self.checks)

    def raise_if_failed(self) -> None:
        """Returns when every rule held.

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
) -> CheckReport:
    """Every rule of the environment contract, and whether the factory's product keeps it.

    Args:
        seeds: one episode is played for each.
        num_steps: at most so many steps of an episode are played.
        choose_action: a legal action for an observation; the default draws one from the
            text face's legal answers, or from the observation's `legal_actions`.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    checks = []
    for rule_name, rule in RULES.items():
        checked = CheckedEnvironment(factory, seeds, num_steps, choose_action)
        checks.append(_run(rule_name, rule, checked))
    return CheckReport(name, checks)


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
