"""What two processes must agree on: wire, configuration, errors, metric names."""
