"""The client of the Kubernetes API server, for gateways and for runs."""
