"""Kubernetes resource quantities such as 500m, 2Gi and 8."""

from __future__ import annotations

from decimal import Decimal

from ludus.proto.errors import ConfigError


def parse_quantity(text: object) -> Decimal:
    """Parse a quantity.

    Raises:
        ConfigError: the text is not a quantity.
    """
    from kubernetes.utils.quantity import parse_quantity as parse_number

    try:
        return Decimal(parse_number(str(text)))
    except ValueError as error:
        raise ConfigError(
            f"expected a resource quantity such as 500m or 2Gi, got '{text}'"
        ) from error


def format_quantity(amount: Decimal, resource: str) -> str:
    """Format a quantity for people; memory and storage in GiB."""
    if "memory" in resource or "storage" in resource:
        return f"{amount / 2**30:.1f} GiB"
    return f"{amount.normalize():f}"
