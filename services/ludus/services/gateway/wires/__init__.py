"""The gateway's HTTP and gRPC wires."""
