"""The MCP wire: any environment as tools, over HTTP and WebSocket."""
