"""The gRPC wire: unary calls, and the call stream that clients, gateways and workers share."""
