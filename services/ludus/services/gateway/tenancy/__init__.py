"""The tenants of a gateway: their authentication, quotas and metrics."""
