"""The gRPC wire: the call stream of clients, gateways and workers, and its port."""
