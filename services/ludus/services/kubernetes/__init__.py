"""The one place that talks to a Kubernetes API server: for gateways in it and for runs on it."""
