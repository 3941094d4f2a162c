"""The servers behind a gateway: their addresses, their load and the placement of sessions."""
