"""Kubernetes resource quantities such as 500m, 2Gi and 8."""

from __future__ import annotations

from decimal import Decimal

from ludus.proto.errors import ConfigError


def parse_quantity(quantity: object) -> Decimal:
    """Parse a resource quantity into a number.

    Raises:
        ConfigError: the quantity is invalid.
    """
    from kubernetes.utils.quantity import parse_quantity as parse_kubernetes_quantity

    try:
        return Decimal(parse_kubernetes_quantity(str(quantity)))
    except ValueError as error:
        raise ConfigError(
            f"expected a resource quantity such as 500m or 2Gi, got '{quantity}'"
        ) from error


def format_quantity(amount: Decimal, resource: str) -> str:
    """Format a quantity; memory and storage are given in GiB."""
    if "memory" in resource or "storage" in resource:
        return f"{amount / 2**30:.1f} GiB"
    return f"{amount.normalize():f}"
