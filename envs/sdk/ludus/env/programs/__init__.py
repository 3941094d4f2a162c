"""Programs that are not ours: each confined as workers are, and ended with what it started."""
