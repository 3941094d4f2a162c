"""The gateway in a Kubernetes cluster: endpoints, leadership, deletion costs and sandboxes."""
