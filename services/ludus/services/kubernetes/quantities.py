"""Amounts of resources as Kubernetes writes them: 500m, 2Gi, 8."""

from __future__ import annotations

from decimal import Decimal

from ludus.proto.errors import ConfigError


def parse_quantity(text: object) -> Decimal:
    """The amount.

    Raises:
        ConfigError: it is none.
    """
    from kubernetes.utils.quantity import parse_quantity as parse

    try:
        return Decimal(parse(str(text)))
    except ValueError as error:
        raise ConfigError(
            f"expected an amount of a resource like 500m or 2Gi, got '{text}'"
        ) from error


def readable(amount: Decimal, resource: str) -> str:
    """An amount for people: memory in GiB."""
    if "memory" in resource or "storage" in resource:
        return f"{amount / 2**30:.1f} GiB"
    return f"{amount.normalize():f}"
