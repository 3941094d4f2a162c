"""Sources of prices: a simulation or a file."""
