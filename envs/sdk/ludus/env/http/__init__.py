"""The HTTP wire: OpenEnv's endpoints and WebSocket, health checks and metrics."""
