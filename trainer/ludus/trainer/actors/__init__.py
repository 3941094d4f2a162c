"""The only place, beside main, that knows Ray: each actor wraps one plain object."""
