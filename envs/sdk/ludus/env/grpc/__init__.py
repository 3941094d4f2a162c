"""The gRPC wire: the call stream that clients, gateways and workers share, and its port."""
