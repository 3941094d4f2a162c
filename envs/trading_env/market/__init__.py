"""Where prices come from: a simulation, or a file."""
