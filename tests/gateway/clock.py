"""A fake clock."""


class Clock:
    """A clock whose time changes only when a test sets it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s
