"""The HTTP wire: OpenEnv's endpoints and WebSocket, health and metrics."""
