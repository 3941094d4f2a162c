"""Shared parts of the HTTP wires: sockets, sessions without a connection, limits for uvicorn."""
