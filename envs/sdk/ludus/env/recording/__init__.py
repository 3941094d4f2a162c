"""Episodes as they were played: written down, read, and verified by playing them again."""
