"""The gateway in a Kubernetes cluster: endpoints, leadership, deletion cost."""
