"""The MCP wire, which offers any environment as tools over HTTP and WebSocket."""
