"""What HTTP wires stand on: sockets, sessions without a connection, and bounds on uvicorn."""
