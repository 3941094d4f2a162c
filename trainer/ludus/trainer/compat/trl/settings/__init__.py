"""GRPOConfig, and the run configuration that follows from it."""
