"""Access control of servers: TLS, tokens, signed session ids and call traces."""
