"""The HTTP and gRPC wires of a gateway."""
